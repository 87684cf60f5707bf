"""int8 weights with a scale for each output; activations are quantised row by row as they come (W8A8)."""

from __future__ import annotations

import torch
from torch import Tensor

from model_worker.kernels.int8_linear import quantize_rows
from model_worker.quant.base import QuantMethod


class Int8(QuantMethod):
    """QuantMethod of int8 weights with a scale for each output. stored: the checkpoint's weights are int8
    already. Otherwise each rank quantises the weights that it loads, with scales for its own part of a row.
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
