"""Quantisation of activations to float8 by rows, and the scaling of a product that was computed without
scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max


def quantize_rows_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (float8_e4m3fn [T, K], scales [T, 1] float32) for x [T, K]. The largest magnitude of a row
    becomes 448.
    """
    wide = x.float()
    scale = (wide.abs().amax(-1, keepdim=True) / LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
    return (wide / scale).clamp_(-LARGEST, LARGEST).to(FP8), scale


def scale_product(
    sums: Tensor, row_scale: Tensor, column_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return [T, N] of dtype: sums [T, N] times row_scale [T, 1] and column_scale [N, 1], both float32, plus
    bias [N]; rounded once.
    """
    scaled = sums * row_scale * column_scale.t()
    return (scaled if bias is None else scaled + bias).to(dtype)
