"""The C++ int8 linear layer as an operator. Its torch version is kernels/int8_linear.py. Knows no layer."""

from __future__ import annotations

from copy import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from model_worker.kernels.native.calls import LinearCall, QuantizeCall
from model_worker.kernels.native.library import DTYPES, NativeKernels
from model_worker.kernels.native.operators import (
    LANES,
    NATIVE_ACTIVATIONS,
    PANEL,
    can_fill,
    pack_panels,
    round_up,
)
from runtime.checkpoint.model_config import Activation

OFFSET = 128  # added to the kernel's quantised rows, which are unsigned
LOWEST = -128  # has no opposite in int8; some kernels need weights without it
MAX_IN_FEATURES = 1 << 16  # sums of 255 * 127 stay below 2^31


def can_pack_int8(weight: Tensor, dtype: torch.dtype) -> bool:
    """Return True if int8 weight [N, K] has a kernel for activations of dtype."""
    k = weight.shape[1]
    return dtype in DTYPES and k % LANES == 0 and k <= MAX_IN_FEATURES and can_fill(weight)


class Int8Linear:
    """Computes x @ weight.T * scale + bias with x quantised by rows. The result of a row has the same bits in
    any batch.
    """

    batch_invariant = True
    packs_weight = True

    def __init__(
        self,
        kernels: NativeKernels,
        weight: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        *,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        """weight [N, K] int8 is packed in place; scale [N] is float32; x and bias [N] are of dtype, and so
        are results unless out_dtype is float32.
        """
        assert can_pack_int8(weight, dtype)
        assert out_dtype in (None, dtype, torch.float32)
        assert bias is None or bias.dtype is dtype
        missing = round_up(len(weight)) - len(weight)
        scale = F.pad(scale, (0, missing))
        sums = F.pad(weight.sum(1, dtype=torch.int32), (0, missing))
        is_symmetric = bool(weight.min() > LOWEST)
        kernels.weights.take(weight, len(scale))
        pack_panels(kernels, weight)
        self._kept = (weight.data, scale, sums, bias)
        self._dtype = dtype
        self._out_dtype = out_dtype or dtype
        self._width, size = weight.shape
        self._quantize = kernels.quantize_rows
        self._run = kernels.int8_linear
        num_threads = torch.get_num_threads()
        number = kernels.number_of(dtype)
        self._rows = QuantizeCall(size=size, dtype=number, num_threads=num_threads)
        self._call = LinearCall(
            weight=weight.data_ptr(),
            weight_scale=scale.data_ptr(),
            weight_sum=sums.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            n=self._width,
            k=size,
            dtype=number,
            out_is_float=self._out_dtype is torch.float32,
            is_symmetric=is_symmetric,
            in_huge_pages=kernels.weights.has(weight),
            num_threads=num_threads,
        )

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return [T, N] for x [T, K], in `out` if it is given."""
        quantized, scale = self.quantize(x)
        if out is None:
            out = self.empty(x.shape[0])
        call = self._call
        call.x = quantized.data_ptr()
        call.x_scale = scale.data_ptr()
        call.out = out.data_ptr()
        call.num_rows = x.shape[0]
        self._run(call)
        return out

    def empty(self, num_rows: int) -> Tensor:
        """Return uninitialised memory for num_rows rows of output."""
        return torch.empty(num_rows, self._width, dtype=self._out_dtype)

    def gated(self, activation: Activation) -> Int8Linear | None:
        """Return this layer followed by Activate(activation, has_up=True) as one operator with the same bits,
        [T, K] -> [T, N / 2]; None if there is no such kernel.
        """
        n = self._width
        if n % (2 * PANEL) or self._out_dtype is not self._dtype or activation not in NATIVE_ACTIVATIONS:
            return None
        gated = copy(self)
        gated._width = n // 2
        gated._call = LinearCall.from_buffer_copy(self._call)
        gated._call.gate = 1 + NATIVE_ACTIVATIONS.index(activation)
        return gated

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return x [T, K] quantised to uint8 [T, K] with OFFSET added, and the rows' scales [T] float32."""
        assert x.is_contiguous()
        assert x.dtype is self._dtype
        quantized = torch.empty(x.shape, dtype=torch.uint8)
        scale = torch.empty(x.shape[0], dtype=torch.float32)
        call = self._rows
        call.x = x.data_ptr()
        call.out = quantized.data_ptr()
        call.scale = scale.data_ptr()
        call.num_rows = x.shape[0]
        self._quantize(call)
        return quantized, scale
