"""float8 weights with a scale for each output, on CUDA. On a CPU they are dequantised during loading."""

from __future__ import annotations

from torch import Tensor

from model_worker.kernels.fp8_rows import FP8
from model_worker.quant.base import QuantMethod

# torch._scaled_mm needs the inner dimension and the columns of a product in multiples of this.
MULTIPLE = 16


class Fp8(QuantMethod):
    """QuantMethod of float8 weights with a scale for each output."""

    stored = FP8

    def can_store(self, weight: Tensor) -> bool:
        """Return True if torch can multiply with it. For experts always True, because our own kernel takes
        any shape.
        """
        return weight.dim() == 3 or all(size % MULTIPLE == 0 for size in weight.shape)

    def compress(self, weight: Tensor) -> None:
        return None
