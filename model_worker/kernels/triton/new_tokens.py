"""Device functions by which decode attention norms, rotates and stores the heads of a new token in its own
launch.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from model_worker.kernels.rms_norm import HeadNorms
from model_worker.kernels.triton.rope_kv_store import _as_kept, _weighted


class NewTokens(NamedTuple):
    """New tokens, one for each sequence: keys and values that are not in the pools yet, and how to prepare
    them and the queries.
    """

    k: Tensor  # [B, num_kv_heads, D] of any row stride, the last two dimensions contiguous; v likewise
    v: Tensor
    slots: Tensor  # [B] int64, where they go
    cos_sin: Tensor | None  # [B, D] float32 that queries and keys are rotated by
    norms: HeadNorms | None  # of queries and keys, before they are rotated


@triton.jit
def _turned_heads(
    heads, weight, angles, inside, eps, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, NORMS: tl.constexpr,
    ROTATES: tl.constexpr,
):  # fmt: skip
    """Return the heads [H, BLOCK_D] at the pointers `heads` [H, 1], normed and rotated, in their dtype."""
    HALF: tl.constexpr = HEAD_DIM // 2
    d = tl.arange(0, BLOCK_D)
    x = tl.load(heads + d[None, :], mask=inside, other=0.0)
    dtype = x.dtype
    if NORMS or ROTATES:
        # What each element turns with is loaded, not moved: it is in the cache.
        partner = tl.where(d < HALF, d + HALF, d - HALF)
        x = x.to(tl.float32)
        y = tl.load(heads + partner[None, :], mask=inside, other=0.0).to(tl.float32)
        if NORMS:
            norm = 1.0 / tl.sqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)
            x = _weighted(x * norm[:, None], weight + d, d < HEAD_DIM, dtype)
            y = _weighted(y * norm[:, None], weight + partner, d < HEAD_DIM, dtype)
        if ROTATES:
            cos = tl.load(angles + d % HALF, mask=d < HEAD_DIM, other=0.0)
            sin = tl.load(angles + HALF + d % HALF, mask=d < HEAD_DIM, other=0.0)
            x = x * cos[None, :] + y * tl.where(d < HALF, -sin, sin)[None, :]
    return x.to(dtype)


@triton.jit
def _store_new(
    k, v, k_weight, angles, k_slot, v_slot, k_inverse, v_inverse, is_own, eps, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, NORMS: tl.constexpr, ROTATES: tl.constexpr,
):  # fmt: skip
    """Return the new token's key and value of one head, [1, BLOCK_D] float32, as the pools keep them: divided
    by their scales if the pool is float8. The program that owns them also stores them.
    """
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = d < HEAD_DIM
    head = tl.zeros([1, 1], tl.int64)
    dtype = k.dtype.element_ty
    kept = k_slot.dtype.element_ty
    key = _turned_heads(k + head, k_weight, angles, inside, eps, HEAD_DIM, BLOCK_D, NORMS, ROTATES)
    key = _as_kept(key, k_inverse, kept)
    value = _as_kept(tl.load(v + d, mask=inside, other=0.0), v_inverse, kept)
    stored = d < tl.where(is_own, HEAD_DIM, 0)
    tl.store(k_slot + d, key, mask=stored)
    tl.store(v_slot + d, value, mask=stored)
    return key.to(dtype).to(tl.float32), value.to(dtype).to(tl.float32)
