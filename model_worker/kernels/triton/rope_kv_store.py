"""Norm and rotate a layer's queries and keys and put keys and values into their KV slots, in one launch.

grid   token
"""

from __future__ import annotations

from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from model_worker.kernels.kv_scale import UNSCALED, KVScale
from model_worker.kernels.rms_norm import HeadNorms
from model_worker.kernels.triton.call_site import CallSite


def rope_and_store_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor | None,
    k_pool: Tensor,
    v_pool: Tensor,
    slots: Tensor,
    norms: HeadNorms | None = None,
    kv_scale: KVScale = UNSCALED,
    *,
    first: int = 0,
) -> None:
    """Norm the heads of q and k as `rms_norm` does, rotate them as `apply_rope` does, q in place; store k,
    and v as it is, at slots: of tokens `first` to T. Without norms, or cos_sin, that step is left out.

    q [T, num_heads, D], k and v [T, num_kv_heads, D], of any row stride, the last two dimensions contiguous;
    cos_sin [T, D] float32 as `rope_cos_sin` makes it; slots [T] int64; pools [num_slots, num_kv_heads, D] of
    the same dtype, or float8_e4m3fn, where they are divided by kv_scale and limited to 448; the norms'
    weights [D].
    """
    num_tokens, num_heads, head_dim = q.shape
    if num_tokens <= first:
        return
    q_weight, k_weight, eps = norms or (q, q, 0.0)
    site = _turning(num_heads, k.shape[1], head_dim, norms is not None, cos_sin is not None)
    site.launch(
        (num_tokens - first, 1, 1), q, k, v, q if cos_sin is None else cos_sin, q_weight, k_weight, k_pool,
        v_pool, slots, q.stride()[0], k.stride()[0], v.stride()[0], k_pool.stride()[0], eps,
        1.0 / kv_scale.key, 1.0 / kv_scale.value, first,
    )  # fmt: skip


@cache
def _turning(num_heads: int, num_kv_heads: int, head_dim: int, norms: bool, rotates: bool) -> CallSite:
    half = head_dim // 2
    return CallSite(
        _turn_and_store, NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads,
        BLOCK_H=triton.next_power_of_2(num_heads), BLOCK_KV=triton.next_power_of_2(num_kv_heads), HALF=half,
        BLOCK_HALF=triton.next_power_of_2(half), NORMS=norms, ROTATES=rotates, num_warps=4,
    )  # fmt: skip


# Chunks come behind decodes, however many these are, and slots at any alignment: nothing is compiled while
# serving.
@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=["slots"])
def _turn_and_store(
    q,
    k,
    v,
    cos_sin,
    q_weight,
    k_weight,
    k_pool,
    v_pool,
    slots,
    q_stride,
    k_stride,
    v_stride,
    slot_stride,
    eps,
    k_inverse,
    v_inverse,
    first,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    NORMS: tl.constexpr,
    ROTATES: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64) + first
    at_slot = tl.load(slots + t) * slot_stride
    angles = cos_sin + t * (2 * HALF)
    d = tl.arange(0, BLOCK_HALF)[None, :]
    h = tl.arange(0, BLOCK_H)[:, None]
    kv_h = tl.arange(0, BLOCK_KV)[:, None]
    is_q, is_kv = (h < NUM_HEADS) & (d < HALF), (kv_h < NUM_KV_HEADS) & (d < HALF)
    in_q, in_kv = h * (2 * HALF) + d, kv_h * (2 * HALF) + d  # of left halves
    # All loads come before the first store: none can be moved before a store to what may be the same memory.
    if NORMS or ROTATES:
        q += t * q_stride
        q_left = tl.load(q + in_q, mask=is_q, other=0.0)
        q_right = tl.load(q + in_q + HALF, mask=is_q, other=0.0)
    k += t * k_stride
    k_left = tl.load(k + in_kv, mask=is_kv, other=0.0)
    k_right = tl.load(k + in_kv + HALF, mask=is_kv, other=0.0)
    v += t * v_stride
    v_left = tl.load(v + in_kv, mask=is_kv, other=0.0)
    v_right = tl.load(v + in_kv + HALF, mask=is_kv, other=0.0)
    if NORMS or ROTATES:
        q_left, q_right = _turned(q_left, q_right, q_weight, angles, eps, HALF, BLOCK_HALF, NORMS, ROTATES)
        k_left, k_right = _turned(k_left, k_right, k_weight, angles, eps, HALF, BLOCK_HALF, NORMS, ROTATES)
        dtype = q.dtype.element_ty
        tl.store(q + in_q, q_left.to(dtype), mask=is_q)
        tl.store(q + in_q + HALF, q_right.to(dtype), mask=is_q)
    kept = k_pool.dtype.element_ty
    k_pool += at_slot
    tl.store(k_pool + in_kv, _as_kept(k_left, k_inverse, kept), mask=is_kv)
    tl.store(k_pool + in_kv + HALF, _as_kept(k_right, k_inverse, kept), mask=is_kv)
    v_pool += at_slot
    tl.store(v_pool + in_kv, _as_kept(v_left, v_inverse, kept), mask=is_kv)
    tl.store(v_pool + in_kv + HALF, _as_kept(v_right, v_inverse, kept), mask=is_kv)


@triton.jit
def _turned(
    left, right, weight, angles, eps, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, NORMS: tl.constexpr,
    ROTATES: tl.constexpr,
):  # fmt: skip
    """Return both halves [heads, BLOCK_HALF] of heads, normed and rotated, in float32."""
    dtype = left.dtype
    d = tl.arange(0, BLOCK_HALF)
    left, right = left.to(tl.float32), right.to(tl.float32)
    if NORMS:
        scale = 1.0 / tl.sqrt(tl.sum(left * left + right * right, 1) / (2 * HALF) + eps)
        left = _weighted(left * scale[:, None], weight + d, d < HALF, dtype)
        right = _weighted(right * scale[:, None], weight + HALF + d, d < HALF, dtype)
    if ROTATES:
        cos = tl.load(angles + d, mask=d < HALF, other=0.0)[None, :]
        sin = tl.load(angles + HALF + d, mask=d < HALF, other=0.0)[None, :]
        left, right = left * cos - right * sin, right * cos + left * sin
    return left, right


@triton.jit
def _weighted(normed, weight, inside, dtype: tl.constexpr):
    """Return the weighted norm, rounded where `rms_norm` rounds."""
    w = tl.load(weight, mask=inside, other=0.0)
    if w.dtype != tl.float32:
        normed = normed.to(dtype).to(tl.float32)
    return (w.to(tl.float32)[None, :] * normed).to(dtype).to(tl.float32)


@triton.jit
def _as_kept(x, inverse, dtype: tl.constexpr):
    """Return x as the pool stores it. inverse: reciprocal of the scale of a float8 pool."""
    if dtype == tl.float8e4nv:
        x = tl.clamp(x.to(tl.float32) * inverse, -448.0, 448.0)
    return x.to(dtype)
