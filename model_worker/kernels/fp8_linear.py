"""Linear layers with float8 weights that have a scale for each output. Activations are quantised by rows on
the fly. NOTE: no test has run this on a GPU yet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

# Torch's message if there is no product with a scale for each row. On Hopper cuBLAS (since 12.9) lacks it for
# some large weights and few rows (pytorch/ao issue 4582), and CUTLASS for some devices.
REFUSALS = (
    "CUBLAS_STATUS_NOT_SUPPORTED",
    "CUBLAS_STATUS_INVALID_VALUE",
    "cutlass cannot implement",
    "not currently supported on your device",
)

QuantizeRows = Callable[[Tensor], tuple[Tensor, Tensor]]
ScaleProduct = Callable[[Tensor, Tensor, Tensor, Tensor | None, torch.dtype], Tensor]


class Fp8Linear:
    """Matrix products of one model. Where the library refuses a product with row scales, it is computed
    without scales, which every device with float8 supports, and another kernel applies the scales.
    """

    def __init__(self, quantize_rows: QuantizeRows, scale_product: ScaleProduct) -> None:
        """quantize_rows, scale_product: as in kernels.fp8_rows."""
        self._quantize_rows = quantize_rows
        self._scale_product = scale_product
        self._refused: dict[torch.Size, int] = {}
        """Maximum number of rows for which a product was refused, by the weight's shape."""
        self._one: Tensor | None = None

    def __call__(self, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        """Return [T, N] of x's dtype for x [T, K], weight [N, K] float8_e4m3fn and scale [N, 1] float32. Uses
        torch._scaled_mm with a scale for each row of both, which takes bfloat16 and adds no bias.
        """
        quantized, x_scale = self._quantize_rows(x)
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
        return self._scale_product(sums, x_scale, scale, bias, x.dtype)

    def note_refusal(self, error: RuntimeError, num_rows: int, shape: torch.Size) -> None:
        """Remember not to ask for products with this weight shape and up to num_rows rows. Raises the error
        if it is not a refusal.
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
        # NOTE: not made while recording, because Device.capture first computes what it records.
        if self._one is None:
            self._one = torch.ones((), dtype=torch.float32, device=device)
        return self._one
