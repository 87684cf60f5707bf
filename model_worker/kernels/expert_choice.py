"""Which experts a token goes through, and what each of them counts."""

from __future__ import annotations

import torch
from torch import Tensor


def choose_experts(scores: Tensor, per_token: int, *, renormalizes: bool) -> tuple[Tensor, Tensor]:
    """The per_token experts of the largest scores, the largest first: (weights, ids), both [T, per_token].

    scores [T, E], of any row stride. A weight is the expert's share in the softmax over all, in float32, then
    rounded to scores' dtype; renormalizes: the chosen ones' shares are divided by their sum before. ids are
    int64, on a GPU int32.
    """
    weights, ids = scores.softmax(-1, dtype=torch.float32).topk(per_token, dim=-1)
    if renormalizes:
        weights /= weights.sum(-1, keepdim=True)
    return weights.to(scores.dtype), ids
