"""Choice of each token's experts, in one launch; see model_worker.kernels.expert_choice.

    grid   token

The scores of a token are in the registers of one warp. Each expert is found by one search for the largest
score. Experts are few, while a sort would take as many steps as a search for each of the scores.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from model_worker.kernels.triton.call_site import CallSite


def choose_experts(scores: Tensor, per_token: int, *, renormalizes: bool) -> tuple[Tensor, Tensor]:
    """Do what model_worker.kernels.expert_choice.choose_experts does. Among equal scores the lowest
    ids win.
    """
    num_tokens, num_experts = scores.shape
    assert scores.stride(1) == 1
    shape = (num_tokens, per_token)
    weights = torch.empty(shape, dtype=scores.dtype, device=scores.device)
    ids = torch.empty(shape, dtype=torch.int32, device=scores.device)
    if num_tokens:
        site = _choice(num_experts, per_token, renormalizes)
        site.launch((num_tokens, 1, 1), scores, weights, ids, scores.stride()[0])
    return weights, ids


@cache
def _choice(num_experts: int, per_token: int, renormalizes: bool) -> CallSite:
    return CallSite(
        _choose, NUM_EXPERTS=num_experts, PER_TOKEN=per_token, RENORMALIZES=renormalizes,
        BLOCK_E=triton.next_power_of_2(num_experts), BLOCK_K=triton.next_power_of_2(per_token), num_warps=1,
    )  # fmt: skip


@triton.jit
def _choose(
    scores, weights, ids, stride, NUM_EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr,
    RENORMALIZES: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    k = tl.arange(0, BLOCK_K)
    left = tl.load(scores + t * stride + e, mask=e < NUM_EXPERTS, other=float("-inf")).to(tl.float32)
    highest = tl.max(left, 0)
    total = tl.sum(tl.exp(left - highest), 0)
    # NOTE: whatever the scores are, NaN too, an id is that of an expert: it becomes an address.
    left = tl.where(left == left, left, float("-inf"))
    best = tl.full([BLOCK_K], float("-inf"), tl.float32)
    chosen = tl.zeros([BLOCK_K], tl.int32)
    for i in range(PER_TOKEN):
        score, expert = tl.max(left, 0, return_indices=True, return_indices_tie_break_left=True)
        best = tl.where(k == i, score, best)
        chosen = tl.where(k == i, expert, chosen)
        left = tl.where(e == expert, float("-inf"), left)
    share = tl.exp(best - highest) / total
    if RENORMALIZES:
        share /= tl.sum(share, 0)
    place = t * PER_TOKEN + k
    tl.store(weights + place, share.to(weights.dtype.element_ty), mask=k < PER_TOKEN)
    tl.store(ids + place, chosen, mask=k < PER_TOKEN)
