"""float8 weights with a scale for each output, on CUDA; activations are quantised by rows as they come.

NOTE: no test has run this on a GPU yet. On a CPU it is not used: such weights are dequantised there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model_worker.kernels.fp8_rows import FP8, quantize_rows_fp8
from model_worker.kernels.native.library import NativeKernels
from model_worker.quant.base import QuantMethod


class Fp8(QuantMethod):
    """See QuantMethod."""

    stored = FP8

    def compress(self, weight: Tensor) -> None:
        return None

    def apply(self, x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
        """torch._scaled_mm with a scale for each row of both; it takes bfloat16 and adds no bias."""
        assert scale is not None
        quantized, x_scale = quantize_rows_fp8(x)
        y = torch._scaled_mm(
            quantized, weight.t(), scale_a=x_scale, scale_b=scale.t(), out_dtype=torch.bfloat16
        )
        return (y if bias is None else y + bias).to(x.dtype)

    def native(
        self,
        kernels: NativeKernels,
        weight: Tensor,
        scale: Tensor | None,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        return None
