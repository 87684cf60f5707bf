"""Root-mean-square norm of rows, alone or fused with the residual addition and the norm before it.

grid   row
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from model_worker.kernels.triton.call_site import CallSite


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Do what model_worker.kernels.rms_norm.rms_norm does, for x [..., N]. [T, heads, N] may have any strides
    of tokens and heads.
    """
    heads = x if x.dim() == 3 else x.reshape(-1, 1, x.shape[-1])
    out = x.new_empty(x.shape)
    num_tokens, num_heads, size = heads.shape
    if num_tokens:
        x_stride, head_stride, _ = heads.stride()
        grid = (num_tokens * num_heads, 1, 1)
        site = _norm(num_heads, size, False, False)
        site.launch(grid, heads, heads, weight, weight, out, x_stride, head_stride, 0, eps)
    return out


def fused_add_rms_norm(
    residual: Tensor, update: Tensor, weight: Tensor, eps: float, update_weight: Tensor | None = None
) -> Tensor:
    """Do what model_worker.kernels.rms_norm.fused_add_rms_norm does, for residual and update [T, N]."""
    out = torch.empty_like(residual)
    num_tokens, size = residual.shape
    if num_tokens:
        norms_update = update_weight is not None
        _norm(1, size, True, norms_update).launch(
            (num_tokens, 1, 1), residual, update, weight, update_weight if norms_update else weight, out,
            residual.stride()[0], size, update.stride()[0], eps,
        )  # fmt: skip
    return out


@cache
def _norm(num_heads: int, size: int, adds: bool, norms_update: bool) -> CallSite:
    block = triton.next_power_of_2(size)
    return CallSite(
        _norm_row, NUM_HEADS=num_heads, SIZE=size, BLOCK=block, ADDS=adds, NORMS_UPDATE=norms_update,
        num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip


@triton.jit
def _norm_row(
    x, update, weight, update_weight, out, x_stride, head_stride, update_stride, eps, NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr, NORMS_UPDATE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < SIZE
    x += row // NUM_HEADS * x_stride + row % NUM_HEADS * head_stride
    value = tl.load(x + i, mask=inside, other=0.0).to(tl.float32)
    dtype = x.dtype.element_ty
    if ADDS:
        added = tl.load(update + row * update_stride + i, mask=inside, other=0.0).to(tl.float32)
        if NORMS_UPDATE:
            added = _normed(added, update_weight, eps, dtype, SIZE, BLOCK).to(tl.float32)
        # What the norm sees is what the residual stream keeps: rounded.
        rounded = (value + added).to(dtype)
        tl.store(x + i, rounded, mask=inside)
        value = rounded.to(tl.float32)
    tl.store(out + row * SIZE + i, _normed(value, weight, eps, dtype, SIZE, BLOCK), mask=inside)


@triton.jit
def _normed(value, weight, eps, dtype: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / SIZE + eps)
    w = tl.load(weight + i, mask=i < SIZE, other=0.0)
    normed = value * scale
    if w.dtype != tl.float32:
        normed = normed.to(dtype).to(tl.float32)
    return (w.to(tl.float32) * normed).to(dtype)
