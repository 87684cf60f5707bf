"""Root-mean-square norm of rows, alone or fused with the residual addition and the norm before it.

grid   row
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As model_worker.kernels.rms_norm.rms_norm, for x [..., N]; [T, heads, N] of any strides of tokens and
    heads is read where it is.
    """
    heads = x if x.dim() == 3 else x.reshape(-1, 1, x.shape[-1])
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(heads, None, weight, None, out, eps)
    return out


def fused_add_rms_norm(
    residual: Tensor, update: Tensor, weight: Tensor, eps: float, update_weight: Tensor | None = None
) -> Tensor:
    """As model_worker.kernels.rms_norm.fused_add_rms_norm, for residual and update [T, N]."""
    out = torch.empty_like(residual)
    _launch(residual.unsqueeze(1), update, weight, update_weight, out, eps)
    return out


def _launch(
    x: Tensor, update: Tensor | None, weight: Tensor, update_weight: Tensor | None, out: Tensor, eps: float
) -> None:
    num_tokens, num_heads, size = x.shape
    if num_tokens == 0:
        return
    block = triton.next_power_of_2(size)
    _norm_row[(num_tokens * num_heads,)](
        x, x if update is None else update, weight, weight if update_weight is None else update_weight, out,
        x.stride(0), x.stride(1), 0 if update is None else update.stride(0), eps, NUM_HEADS=num_heads,
        SIZE=size, BLOCK=block, ADDS=update is not None, NORMS_UPDATE=update_weight is not None,
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
