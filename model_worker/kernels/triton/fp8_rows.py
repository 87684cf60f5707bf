"""Quantisation of rows to float8, and the scaling of a product; see model_worker.kernels.fp8_rows.

    grid   row                        quantise a row
    grid   row × block of columns     scale a product

A row is read once: it stays in registers between the search for its largest magnitude and the division.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from model_worker.kernels.triton.call_site import CallSite

LARGEST: tl.constexpr = tl.constexpr(448.0)
BLOCK = 1024
TINY: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).tiny)


def quantize_rows_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Do what model_worker.kernels.fp8_rows.quantize_rows_fp8 does, for x of any row stride."""
    num_rows, width = x.shape
    out = torch.empty((num_rows, width), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=x.device)
    if num_rows:
        _quantizes(width).launch((num_rows, 1, 1), x, out, scales, x.stride()[0])
    return out, scales


@cache
def _quantizes(width: int) -> CallSite:
    block = triton.next_power_of_2(width)
    return CallSite(_quantize_row, WIDTH=width, BLOCK=block, num_warps=4 if block <= 4096 else 8)


@triton.jit
def _quantize_row(x, out, scales, x_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    values = tl.load(x + row * x_stride + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.math.div_rn(tl.max(tl.abs(values), 0), LARGEST), TINY)
    quantized = tl.clamp(tl.math.div_rn(values, scale), -LARGEST, LARGEST)
    tl.store(out + row * WIDTH + i, quantized.to(out.dtype.element_ty), mask=i < WIDTH)
    tl.store(scales + row, scale)


def scale_product(
    sums: Tensor, row_scale: Tensor, column_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Do what model_worker.kernels.fp8_rows.scale_product does; all tensors are contiguous."""
    num_rows, width = sums.shape
    out = torch.empty((num_rows, width), dtype=dtype, device=sums.device)
    if num_rows:
        grid = (num_rows, -(-width // BLOCK), 1)
        site = _scales(width, bias is not None)
        site.launch(grid, sums, row_scale, column_scale, out if bias is None else bias, out)
    return out


@cache
def _scales(width: int, has_bias: bool) -> CallSite:
    return CallSite(_scale_row, WIDTH=width, HAS_BIAS=has_bias, BLOCK=BLOCK, num_warps=4)


@triton.jit
def _scale_row(
    sums, row_scale, column_scale, bias, out, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < WIDTH
    scaled = tl.load(sums + row * WIDTH + i, mask=inside, other=0.0) * tl.load(row_scale + row)
    scaled *= tl.load(column_scale + i, mask=inside, other=0.0)
    if HAS_BIAS:
        scaled += tl.load(bias + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + i, scaled.to(out.dtype.element_ty), mask=inside)
