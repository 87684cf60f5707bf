"""Root-mean-square norm of rows, alone or fused with the residual addition before it.

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
    _launch(heads, heads, weight, out, eps, adds=False)
    return out


def fused_add_rms_norm(residual: Tensor, update: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As model_worker.kernels.rms_norm.fused_add_rms_norm, for residual and update [T, N]."""
    out = torch.empty_like(residual)
    _launch(residual.unsqueeze(1), update, weight, out, eps, adds=True)
    return out


def _launch(x: Tensor, update: Tensor, weight: Tensor, out: Tensor, eps: float, *, adds: bool) -> None:
    num_tokens, num_heads, size = x.shape
    if num_tokens == 0:
        return
    block = triton.next_power_of_2(size)
    _norm_row[(num_tokens * num_heads,)](
        x,
        update,
        weight,
        out,
        x.stride(0),
        x.stride(1),
        update.stride(0),
        eps,
        NUM_HEADS=num_heads,
        SIZE=size,
        BLOCK=block,
        ADDS=adds,
        num_warps=min(16, max(1, block // 512)),
    )


@triton.jit
def _norm_row(
    x,
    update,
    weight,
    out,
    x_stride,
    head_stride,
    update_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < SIZE
    x += row // NUM_HEADS * x_stride + row % NUM_HEADS * head_stride
    value = tl.load(x + i, mask=inside, other=0.0).to(tl.float32)
    dtype = x.dtype.element_ty
    if ADDS:
        value += tl.load(update + row * update_stride + i, mask=inside, other=0.0).to(tl.float32)
        # What the norm sees is what the residual stream keeps: rounded.
        rounded = value.to(dtype)
        tl.store(x + i, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / SIZE + eps)
    w = tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    normed = value * scale
    if weight.dtype.element_ty != tl.float32:
        normed = normed.to(dtype).to(tl.float32)
    tl.store(out + row * SIZE + i, (w * normed).to(dtype), mask=inside)
