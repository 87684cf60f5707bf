"""int8 weights with a scale for each output; activations are quantised row by row as they come (W8A8)."""

from __future__ import annotations

import torch
from torch import Tensor

from model_worker.kernels.int8_linear import int8_linear, quantize_rows
from model_worker.kernels.native.int8_linear import Int8Linear, can_pack_int8
from model_worker.kernels.native.library import NativeKernels
from model_worker.quant.base import Multiply, QuantMethod


class Int8(QuantMethod):
    """See QuantMethod. stored: the checkpoint has int8 already; otherwise each rank makes it of what it
    loads, with scales of its own part of a row.
    """

    def __init__(self, *, stored: bool) -> None:
        self.stored = torch.int8 if stored else None

    def can_store(self, weight: Tensor) -> bool:
        return True

    def compress(self, weight: Tensor) -> tuple[Tensor, Tensor] | None:
        if self.stored:
            return None
        quantized, scale = quantize_rows(weight)
        return quantized, scale.unsqueeze(-1)

    def apply(self, x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
        assert scale is not None
        return int8_linear(x, weight, scale.squeeze(-1), bias)

    def native(
        self,
        kernels: NativeKernels,
        weight: Tensor,
        scale: Tensor | None,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> Multiply | None:
        assert scale is not None
        if not can_pack_int8(weight, dtype):
            return None
        return Int8Linear(kernels, weight, scale.squeeze(-1), bias, dtype)
