"""Rows in float8 with a scale each, as they come: the activations of a product with float8 weights; and what
such a product comes to, where it is made without its scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max


def quantize_rows_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] -> (float8_e4m3fn [T, K], scales [T, 1] float32); a row's largest magnitude is 448."""
    wide = x.float()
    scale = (wide.abs().amax(-1, keepdim=True) / LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
    return (wide / scale).clamp_(-LARGEST, LARGEST).to(FP8), scale


def scale_product(
    sums: Tensor, row_scale: Tensor, column_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """sums [T, N], row_scale [T, 1] and column_scale [N, 1] float32, bias [N] -> sums times both scales, plus
    bias, [T, N] of dtype; rounded once.
    """
    scaled = sums * row_scale * column_scale.t()
    return (scaled if bias is None else scaled + bias).to(dtype)
