"""Choice of each token's experts, and their weights."""

from __future__ import annotations

import torch
from torch import Tensor


def choose_experts(scores: Tensor, per_token: int, *, renormalizes: bool) -> tuple[Tensor, Tensor]:
    """Return (weights, ids), both [T, per_token]: the experts with the largest scores, the largest first.

    scores [T, E], of any row stride. A weight is the expert's share in the softmax over all experts, computed
    in float32 and rounded to scores' dtype. renormalizes: first divide the chosen shares by their sum. ids
    are int64, on a GPU int32.
    """
    weights, ids = scores.softmax(-1, dtype=torch.float32).topk(per_token, dim=-1)
    if renormalizes:
        weights /= weights.sum(-1, keepdim=True)
    return weights.to(scores.dtype), ids
