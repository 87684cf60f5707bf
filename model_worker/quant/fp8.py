"""float8 weights with a scale for each output, on CUDA; activations are quantised by rows as they come.

NOTE: no test has run this on a GPU yet. On a CPU it is not used: such weights are dequantised there.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from model_worker.kernels.fp8_rows import FP8, quantize_rows_fp8, scale_product
from model_worker.kernels.native.library import NativeKernels
from model_worker.quant.base import QuantMethod

logger = logging.getLogger(__name__)

# torch._scaled_mm wants products' inner dimension and columns in multiples of it.
MULTIPLE = 16
# How torch says that there is no product with a scale for each row. On Hopper cuBLAS (since 12.9) has none
# for some large weights and few rows (pytorch/ao issue 4582), and CUTLASS for some devices.
REFUSALS = (
    "CUBLAS_STATUS_NOT_SUPPORTED",
    "CUBLAS_STATUS_INVALID_VALUE",
    "cutlass cannot implement",
    "not currently supported on your device",
)


class Fp8(QuantMethod):
    """See QuantMethod. Where the library refuses a product with a scale for each row, the product is made
    without scales, which every device with float8 has, and scaled by a kernel behind it.
    """

    stored = FP8

    def __init__(self) -> None:
        self._refused: dict[torch.Size, int] = {}
        """The most rows that were refused, by the weight's shape."""
        self._one: Tensor | None = None

    def can_store(self, weight: Tensor) -> bool:
        """Experts are multiplied by a kernel of our own, which takes any shape."""
        return weight.dim() == 3 or all(size % MULTIPLE == 0 for size in weight.shape)

    def compress(self, weight: Tensor) -> None:
        return None

    def apply(self, x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
        """torch._scaled_mm with a scale for each row of both; it takes bfloat16 and adds no bias."""
        assert scale is not None
        quantized, x_scale = quantize_rows_fp8(x)
        if len(x) > self._refused.get(weight.shape, -1):
            try:
                y = torch._scaled_mm(
                    quantized, weight.t(), scale_a=x_scale, scale_b=scale.t(), out_dtype=torch.bfloat16
                )
            except RuntimeError as error:
                self.note_refusal(error, len(x), weight.shape)
            else:
                return (y if bias is None else y + bias).to(x.dtype)
        one = self._one_on(x.device)
        sums = torch._scaled_mm(quantized, weight.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
        return scale_product(sums, x_scale, scale, bias, x.dtype)

    def note_refusal(self, error: RuntimeError, num_rows: int, shape: torch.Size) -> None:
        """Ask no more for products of so many rows, or fewer, and weights of that shape. Raises what is no
        refusal.
        """
        if not any(refusal in str(error) for refusal in REFUSALS):
            raise error
        if shape not in self._refused:
            logger.info(
                "products of %d rows and float8 weights %s are scaled afterwards: %s",
                num_rows,
                list(shape),
                error,
            )
        self._refused[shape] = num_rows

    def _one_on(self, device: torch.device) -> Tensor:
        # NOTE: made before anything is recorded: Device.capture computes first what it records.
        if self._one is None:
            self._one = torch.ones((), dtype=torch.float32, device=device)
        return self._one

    def native(
        self,
        kernels: NativeKernels,
        weight: Tensor,
        scale: Tensor | None,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        return None
