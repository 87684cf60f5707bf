"""Rotate a layer's queries and keys and put keys and values into their KV slots, in one launch.

grid   token
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def rope_and_store_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor | None,
    k_pool: Tensor,
    v_pool: Tensor,
    slots: Tensor,
) -> None:
    """Rotate q in place by cos_sin; store the rotated k, and v, at slots. None: neither is rotated.

    q [T, num_heads, D], k and v [T, num_kv_heads, D], of any row stride, the last two dimensions contiguous;
    cos_sin [T, D] float32 as `rope_cos_sin` makes it; slots [T] int64; pools [num_slots, num_kv_heads, D] of
    the same dtype, or float8_e4m3fn, where what is beyond 448 is stored as 448.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    if num_tokens == 0:
        return
    half = head_dim // 2
    _rotate_and_store[(num_tokens,)](
        q,
        k,
        v,
        cos_sin if cos_sin is not None else q,
        k_pool,
        v_pool,
        slots,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        k_pool.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_H=triton.next_power_of_2(num_heads),
        BLOCK_KV=triton.next_power_of_2(num_kv_heads),
        HALF=half,
        BLOCK_HALF=triton.next_power_of_2(half),
        ROTATES=cos_sin is not None,
        num_warps=4,
    )


@triton.jit
def _rotate_and_store(
    q,
    k,
    v,
    cos_sin,
    k_pool,
    v_pool,
    slots,
    q_stride,
    k_stride,
    v_stride,
    slot_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    ROTATES: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + t)
    d = tl.arange(0, BLOCK_HALF)
    h = tl.arange(0, BLOCK_H)[:, None]
    kv_h = tl.arange(0, BLOCK_KV)[:, None]
    kv_left = kv_h * (2 * HALF) + d[None, :]
    kv_inside = (kv_h < NUM_KV_HEADS) & (d[None, :] < HALF)
    k_left = tl.load(k + t * k_stride + kv_left, mask=kv_inside, other=0.0)
    k_right = tl.load(k + t * k_stride + kv_left + HALF, mask=kv_inside, other=0.0)
    if ROTATES:
        cos = tl.load(cos_sin + t * (2 * HALF) + d, mask=d < HALF, other=0.0)[None, :]
        sin = tl.load(cos_sin + t * (2 * HALF) + HALF + d, mask=d < HALF, other=0.0)[None, :]
        left = h * (2 * HALF) + d[None, :]
        inside = (h < NUM_HEADS) & (d[None, :] < HALF)
        q_left = tl.load(q + t * q_stride + left, mask=inside, other=0.0).to(tl.float32)
        q_right = tl.load(q + t * q_stride + left + HALF, mask=inside, other=0.0).to(tl.float32)
        dtype = q.dtype.element_ty
        tl.store(q + t * q_stride + left, (q_left * cos - q_right * sin).to(dtype), mask=inside)
        tl.store(q + t * q_stride + left + HALF, (q_right * cos + q_left * sin).to(dtype), mask=inside)
        wide_left, wide_right = k_left.to(tl.float32), k_right.to(tl.float32)
        k_left = wide_left * cos - wide_right * sin
        k_right = wide_right * cos + wide_left * sin
    kept = k_pool.dtype.element_ty
    tl.store(k_pool + slot * slot_stride + kv_left, _as_kept(k_left, kept), mask=kv_inside)
    tl.store(k_pool + slot * slot_stride + kv_left + HALF, _as_kept(k_right, kept), mask=kv_inside)
    v_left = tl.load(v + t * v_stride + kv_left, mask=kv_inside, other=0.0)
    v_right = tl.load(v + t * v_stride + kv_left + HALF, mask=kv_inside, other=0.0)
    tl.store(v_pool + slot * slot_stride + kv_left, _as_kept(v_left, kept), mask=kv_inside)
    tl.store(v_pool + slot * slot_stride + kv_left + HALF, _as_kept(v_right, kept), mask=kv_inside)


@triton.jit
def _as_kept(x, dtype: tl.constexpr):
    if dtype == tl.float8e4nv:
        x = tl.clamp(x.to(tl.float32), -448.0, 448.0)
    return x.to(dtype)
