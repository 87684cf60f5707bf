"""Weights in the model's own dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from model_worker.kernels.linear import linear
from model_worker.kernels.native.library import NativeKernels
from model_worker.kernels.native.operators import PackedLinear, can_pack, pack
from model_worker.quant.base import Multiply, QuantMethod


class Unquantized(QuantMethod):
    """See QuantMethod."""

    stored = None

    def can_store(self, weight: Tensor) -> bool:
        return True

    def compress(self, weight: Tensor) -> None:
        return None

    def apply(self, x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
        return linear(x, weight, bias)

    def native(
        self,
        kernels: NativeKernels,
        weight: Tensor,
        scale: Tensor | None,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> Multiply | None:
        if not can_pack(kernels, weight):
            return None
        pack(kernels, weight)
        return PackedLinear(kernels, weight, bias, out_dtype=dtype)


UNQUANTIZED = Unquantized()
