"""Log-probabilities of a chosen id and of the most likely ones, without a sort and without a whole softmax.

    grid   row × block of the vocabulary   `_best_of_block`: its largest logits, its part of the softmax's
                                           sum, how many of it precede the chosen id
    grid   row                             `_merge`: the sum, the largest of the blocks' largest,
                                           the place of the chosen id

Logit and id make one integer key, so that equal logits are in the order of their ids, as in
model_worker.sampling.truncation. Logits are read once.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from model_worker.kernels.triton.call_site import CallSite
from model_worker.kernels.triton.truncation import _key
from runtime.sampling.table import MAX_LOGPROBS

BLOCK = 4096
LOWEST: tl.constexpr = tl.constexpr(-(1 << 63))
ID_MASK: tl.constexpr = tl.constexpr((1 << 32) - 1)


def top_logprobs(
    logits: Tensor, tokens: Tensor, num_top: int, *, ranks: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Do what logprobs_of does: return the log-softmax at tokens [m] float32, the most likely ids [m,
    num_top] int32, their log-softmax, and with ranks the places of tokens [m] int32. logits [m, V] float32
    contiguous, tokens [m] int64, num_top at most V.
    """
    num_rows, vocab_size = logits.shape
    device = logits.device
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    keys = torch.empty((num_rows, num_blocks * num_top), dtype=torch.int64, device=device)
    highest = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=device)
    sums = torch.empty_like(highest)
    chosen = torch.empty(num_rows, dtype=torch.float32, device=device)
    ids = torch.empty((num_rows, num_top), dtype=torch.int32, device=device)
    top = torch.empty((num_rows, num_top), dtype=torch.float32, device=device)
    # Counted for whoever asks: a kernel that does not count is another one to compile.
    counts = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=device)
    places = torch.empty(num_rows, dtype=torch.int32, device=device)
    if num_rows:
        of_block, merge = _sites(num_blocks, num_top)
        of_block.launch(
            (num_rows, num_blocks, 1), logits, tokens, keys, highest, sums, counts, vocab_size, num_top
        )
        merge.launch(
            (num_rows, 1, 1), logits, tokens, keys, highest, sums, counts, chosen, ids, top, places,
            vocab_size, num_blocks, num_top,
        )  # fmt: skip
    return chosen, ids, top, places if ranks else None


@cache
def _sites(num_blocks: int, num_top: int) -> tuple[CallSite, CallSite]:
    num_keys = num_blocks * max(num_top, MAX_LOGPROBS)
    return (
        CallSite(_best_of_block, BLOCK=BLOCK, num_warps=8),
        CallSite(
            _merge, BLOCKS=triton.next_power_of_2(num_blocks), KEYS=triton.next_power_of_2(num_keys),
            num_warps=4,
        ),
    )  # fmt: skip


@triton.jit
def _place_key(x, token):
    """int64 in the order of the floats, equals by id, the lowest last."""
    return (_key(x).to(tl.int64) << 32) | (ID_MASK - token.to(tl.int64))


@triton.jit(do_not_specialize=["num_top"])
def _best_of_block(
    logits, tokens, keys, highest, sums, counts, vocab_size, num_top, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    place = row * tl.num_programs(1) + block
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    x = tl.load(logits + row * vocab_size + token, mask=inside, other=float("-inf"))
    largest = tl.max(x, 0)
    base = tl.where(largest == float("-inf"), 0.0, largest)  # of -inf alone the sum is 0
    tl.store(highest + place, largest)
    tl.store(sums + place, tl.sum(tl.exp(x - base), 0))
    key = tl.where(inside, _place_key(x, token), LOWEST)
    chosen = tl.load(tokens + row)
    own = _place_key(tl.load(logits + row * vocab_size + chosen), chosen)
    tl.store(counts + place, tl.sum((key > own).to(tl.int32), 0))
    for n in range(num_top):
        best = tl.max(key, 0)
        tl.store(keys + place * num_top + n, best)
        key = tl.where(key == best, LOWEST, key)


@triton.jit(do_not_specialize=["num_top"])
def _merge(
    logits, tokens, keys, highest, sums, counts, chosen, ids, top, places, vocab_size, num_blocks, num_top,
    BLOCKS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BLOCKS)
    present = b < num_blocks
    each = tl.load(highest + row * num_blocks + b, mask=present, other=float("-inf"))
    largest = tl.max(each, 0)
    part = tl.load(sums + row * num_blocks + b, mask=present, other=0.0)
    # A block of -inf alone adds nothing.
    total = tl.sum(tl.where(part > 0.0, part * tl.exp(each - largest), 0.0), 0)
    log_sum = largest + tl.log(total)
    token = tl.load(tokens + row)
    tl.store(chosen + row, tl.load(logits + row * vocab_size + token) - log_sum)
    before = tl.load(counts + row * num_blocks + b, mask=present, other=0)
    tl.store(places + row, tl.sum(before, 0) + 1)
    k = tl.arange(0, KEYS)
    num_keys = num_blocks * num_top
    key = tl.load(keys + row * num_keys + k, mask=k < num_keys, other=LOWEST)
    for n in range(num_top):
        best = tl.max(key, 0)
        key = tl.where(key == best, LOWEST, key)
        token = ID_MASK - (best & ID_MASK)
        tl.store(ids + row * num_top + n, token.to(tl.int32))
        tl.store(top + row * num_top + n, tl.load(logits + row * vocab_size + token) - log_sum)
