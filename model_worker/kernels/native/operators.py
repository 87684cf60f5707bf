"""The C++ kernels as operators: calls whose constant arguments are filled in once. They know weights, no
layer.

An operator belongs to the thread that runs the forward. Filling in a call costs less than passing arguments:
a step of a small model makes about fifty calls of a few microseconds each.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from model_worker.kernels.native.calls import (
    ActivateCall,
    CombineCall,
    LinearCall,
    NormCall,
    RotaryCall,
    TakeCall,
)
from model_worker.kernels.native.library import DTYPES, NativeKernels
from runtime.checkpoint.model_config import Activation

NATIVE_ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu", "gelu_pytorch_tanh")
LANES = 16  # sizes that kernels work on are multiples of the widest vector of floats
PANEL = 16  # rows of a packed weight that are interleaved


def can_pack(weight: Tensor) -> bool:
    """Return True if a linear layer with this weight [N, K] has a packed kernel."""
    return weight.dtype in DTYPES and weight.shape[1] * weight.element_size() % 4 == 0 and can_fill(weight)


def can_fill(weight: Tensor) -> bool:
    """Return True if the rows of weight [N, K] fill whole panels, or are followed by room for the rest, or
    may be moved to where there is room.
    """
    size, row_bytes = weight.untyped_storage().nbytes(), weight.shape[1] * weight.element_size()
    return len(weight) % PANEL == 0 or size in (weight.nbytes, round_up(len(weight)) * row_bytes)


def pack(kernels: NativeKernels, weight: Tensor) -> None:
    """Pack weight [N, K] in place. Afterwards only PackedLinear and NativeTakeRows can read it."""
    assert can_pack(weight)
    kernels.weights.take(weight, round_up(len(weight)))
    pack_panels(kernels, weight)


def pack_panels(kernels: NativeKernels, weight: Tensor, num_threads: int = 0) -> None:
    """Interleave rows of weight [N, K] in place; rows must be whole 32-bit words. A weight whose rows do not
    fill whole panels is first moved to memory with room for them, if it has none. num_threads: 0: as many as
    torch uses.
    """
    assert weight.is_contiguous()
    room_bytes = round_up(len(weight)) * weight.shape[1] * weight.element_size()
    if weight.untyped_storage().nbytes() < weight.storage_offset() * weight.element_size() + room_bytes:
        room = weight.new_empty(round_up(len(weight)), weight.shape[1])[: len(weight)]
        weight.data = room.copy_(weight)
    n, row_bytes = weight.shape[0], weight.shape[1] * weight.element_size()
    threads = num_threads or torch.get_num_threads()
    kernels.pack_panels(weight.data_ptr(), n, row_bytes, word_bytes(weight), threads)


def word_bytes(weight: Tensor) -> int:
    """Return the number of bytes of a row that stay together when it is packed."""
    return 2 if weight.dtype is torch.float16 else 4


def round_up(rows: int) -> int:
    """Return the number of rows rounded up to whole panels."""
    return -(-rows // PANEL) * PANEL


class NativeTakeRows:
    """Lookup of table rows by index: for embeddings, and for the tokens whose hidden states are wanted."""

    def __init__(self, kernels: NativeKernels) -> None:
        self._number_of = kernels.number_of
        self._run = kernels.take
        self._call = TakeCall(num_threads=torch.get_num_threads())

    def __call__(
        self,
        table: Tensor,
        index: Tensor,
        *,
        packed: bool = False,
        row_scale: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return rows [T, K] of table [N, K] for index [T] int64, each below N. packed: the table was packed
        by `pack`. Rows must be whole 32-bit words. row_scale [N] float32: the table is int8, and rows times
        their scale become dtype.
        """
        assert table.is_contiguous()
        assert index.is_contiguous()
        assert (row_scale is None) == (dtype is None)
        out = torch.empty(index.shape[0], table.shape[1], dtype=dtype or table.dtype)
        call = self._call
        call.table = table.data_ptr()
        call.index = index.data_ptr()
        call.out = out.data_ptr()
        call.row_bytes = table.shape[1] * table.element_size()
        call.num_rows = index.shape[0]
        call.packed_bytes = word_bytes(table) if packed else 0
        call.row_scale = None if row_scale is None else row_scale.data_ptr()
        call.dtype = 0 if dtype is None else self._number_of(dtype)
        self._run(call)
        return out


def can_take(table: Tensor) -> bool:
    """Return True if NativeTakeRows supports this table [N, K]."""
    return table.shape[1] * table.element_size() % 4 == 0


class RotaryAngles:
    """Computes cosines and sines of positions as rope_cos_sin does, times an amplitude."""

    def __init__(self, kernels: NativeKernels, frequencies: Tensor, amplitude: Tensor | None) -> None:
        """frequencies [D / 2] float32, in radians per position; amplitude [D] float32."""
        self._kept = (frequencies.contiguous(), None if amplitude is None else amplitude.contiguous())
        self._run = kernels.rotary
        self._half = frequencies.shape[0]
        self._call = RotaryCall(
            frequencies=self._kept[0].data_ptr(),
            amplitude=None if self._kept[1] is None else self._kept[1].data_ptr(),
            half=self._half,
            num_threads=torch.get_num_threads(),
        )

    def __call__(self, positions: Tensor) -> Tensor:
        """Return [T, D] float32 for positions [T] int64."""
        assert positions.is_contiguous()
        out = torch.empty(positions.shape[0], 2 * self._half)
        call = self._call
        call.positions = positions.data_ptr()
        call.out = out.data_ptr()
        call.num_tokens = positions.shape[0]
        self._run(call)
        return out


class PackedLinear:
    """Computes x @ weight.T + bias with a packed weight. The result of a row has the same bits in
    any batch.
    """

    batch_invariant = True
    packs_weight = True

    def __init__(
        self, kernels: NativeKernels, weight: Tensor, bias: Tensor | None, *, out_dtype: torch.dtype
    ) -> None:
        """weight [N, K] is packed, bias [N] of its dtype. The sum is float32 and is rounded once to
        out_dtype, which is the weight's dtype or float32.
        """
        assert bias is None or bias.dtype is weight.dtype
        assert out_dtype in (weight.dtype, torch.float32)
        self._kept = (weight, bias)
        self._kernels = kernels
        self._run = kernels.linear
        self._width = weight.shape[0]
        self._out_dtype = out_dtype
        self._call = LinearCall(
            weight=weight.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            n=weight.shape[0],
            k=weight.shape[1],
            dtype=kernels.number_of(weight.dtype),
            out_is_float=out_dtype is torch.float32,
            in_huge_pages=kernels.weights.has(weight),
            num_threads=torch.get_num_threads(),
        )

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return [T, N] of out_dtype for x [T, K] of the weight's dtype, in `out` if it is given."""
        assert x.is_contiguous()
        if out is None:
            out = self.empty(x.shape[0])
        call = self._call
        call.x = x.data_ptr()
        call.out = out.data_ptr()
        call.num_rows = x.shape[0]
        self._run(call)
        return out

    def empty(self, num_rows: int) -> Tensor:
        """Return uninitialised memory for num_rows rows of output."""
        return torch.empty(num_rows, self._width, dtype=self._out_dtype)

    def gated(self, activation: Activation) -> PackedLinear | None:
        """Return this layer followed by Activate(activation, has_up=True) as one operator with the same bits,
        [T, K] -> [T, N / 2]; None if there is no such kernel.
        """
        n, dtype = self._call.n, self._kept[0].dtype
        if n % (2 * PANEL) or self._out_dtype is not dtype or activation not in NATIVE_ACTIVATIONS:
            return None
        gated = PackedLinear(self._kernels, *self._kept, out_dtype=self._out_dtype)
        gated._width = n // 2
        gated._call.gate = 1 + NATIVE_ACTIVATIONS.index(activation)
        return gated


class NativeNorm:
    """RMS norm or, with `centers`, layer norm over the last dimension N, which is a multiple of LANES."""

    def __init__(
        self,
        kernels: NativeKernels,
        weight: Tensor,
        eps: float,
        *,
        dtype: torch.dtype,
        bias: Tensor | None = None,
        centers: bool = False,
        is_wide: bool = False,
    ) -> None:
        """weight, bias: [N] or [heads, N], float32 or the input's dtype. is_wide: they are applied before
        rounding; otherwise the weight multiplies the rounded norm.
        """
        assert weight.is_contiguous()
        assert weight.dtype in (dtype, torch.float32)
        assert bias is None or (bias.dtype is weight.dtype and bias.is_contiguous())
        self._kept = (weight, bias)
        self._run = kernels.norm
        self._call = NormCall(
            weight=weight.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            size=weight.shape[-1],
            weight_stride=weight.shape[-1] if weight.dim() == 2 else 0,
            dtype=kernels.number_of(dtype),
            weight_is_float=weight.dtype is torch.float32,
            centers=centers,
            is_wide=is_wide,
            num_threads=torch.get_num_threads(),
            eps=eps,
        )

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the norm of x [T, N] or [T, heads, N], whose tokens may have any stride, contiguous. With
        residual [T, N]: first add x to it in place, and return the norm of the sum.
        """
        tokens, heads = x.shape[0], (x.shape[1] if x.dim() == 3 else 1)
        assert x.stride(-1) == 1
        assert x.dim() == 2 or x.stride(1) == x.shape[2]
        out = torch.empty(x.shape, dtype=x.dtype)
        call = self._call
        call.x = x.data_ptr()
        call.out = out.data_ptr()
        call.token_stride = x.stride(0)
        call.tokens = tokens
        call.heads = heads
        if residual is None:
            call.residual = None
        else:
            assert residual.is_contiguous()
            call.residual = residual.data_ptr()
        self._run(call)
        return out

    def add_and_norm(
        self, residual: Tensor, update: Tensor, update_norm: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        """Add update, normed by update_norm if given, to residual in place, and return the norm of
        the sum.
        """
        return self(update if update_norm is None else update_norm(update), residual)


class Activate:
    """Activation function of a feed-forward layer, with or without a gate."""

    def __init__(self, kernels: NativeKernels, activation: Activation, *, has_up: bool) -> None:
        self._number_of = kernels.number_of
        self._run = kernels.activate
        self._parts = 2 if has_up else 1
        self._call = ActivateCall(
            activation=NATIVE_ACTIVATIONS.index(activation),
            has_up=has_up,
            num_threads=torch.get_num_threads(),
        )

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return activation(x) or, with has_up, activation(gate) * up for x [T, 2 * I] which holds gate and
        then up; in `out` if given. I is a multiple of LANES.
        """
        assert x.is_contiguous()
        rows, width = x.shape
        if out is None:
            out = torch.empty(rows, width // self._parts, dtype=x.dtype)
        call = self._call
        call.x = x.data_ptr()
        call.out = out.data_ptr()
        call.rows = rows
        call.size = width // self._parts
        call.dtype = self._number_of(x.dtype)
        self._run(call)
        return out


class Combine:
    """Operator of kernels/combine.py, with the same arguments."""

    def __init__(self, kernels: NativeKernels) -> None:
        self._number_of = kernels.number_of
        self._run = kernels.combine
        self._call = CombineCall(num_threads=torch.get_num_threads())

    def __call__(
        self,
        x: Tensor,
        *,
        scale: float = 1.0,
        cap: float | None = None,
        add: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Combine x, add and out, which are [T, N], contiguous and of one dtype."""
        if out is None:
            out = torch.empty(x.shape, dtype=x.dtype)
        assert all(each is None or each.is_contiguous() for each in (x, add, out))
        call = self._call
        call.x = x.data_ptr()
        call.add = None if add is None else add.data_ptr()
        call.out = out.data_ptr()
        call.rows, call.size = x.shape
        call.dtype = self._number_of(x.dtype)
        call.scale = scale
        call.cap = cap or 0.0
        self._run(call)
        return out
