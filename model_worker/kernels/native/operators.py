"""The C++ kernels as operators of a layer: a call whose constants are filled in once. Know weights, no layer.

An operator belongs to the thread that runs the forward. Filling in a call costs less than passing arguments:
a step of a small model makes some fifty calls of a few microseconds each.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from model_worker.kernels.native.library import (
    DTYPES,
    ActivateCall,
    CombineCall,
    LinearCall,
    NativeKernels,
    NormCall,
    RotaryCall,
    TakeCall,
)
from runtime.checkpoint.model_config import Activation

NATIVE_ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu", "gelu_pytorch_tanh")
LANES = 16  # sizes that kernels work on are multiples of the widest vector of floats
PANEL = 16  # rows of a packed weight that are interleaved


def can_pack(weight: Tensor) -> bool:
    """Tell whether a linear layer of this weight [N, K] has a packed kernel."""
    return weight.dtype in DTYPES and weight.shape[1] * weight.element_size() % 4 == 0 and can_fill(weight)


def can_fill(weight: Tensor) -> bool:
    """Tell whether rows of weight [N, K] fill panels, or have room behind them, or may be moved to where some
    is.
    """
    size, row_bytes = weight.untyped_storage().nbytes(), weight.shape[1] * weight.element_size()
    return len(weight) % PANEL == 0 or size in (weight.nbytes, round_up(len(weight)) * row_bytes)


def pack(kernels: NativeKernels, weight: Tensor) -> None:
    """Rearrange weight [N, K] in place, as only PackedLinear and NativeTakeRows read it."""
    assert can_pack(weight)
    kernels.weights.take(weight, round_up(len(weight)))
    pack_panels(kernels, weight)


def pack_panels(kernels: NativeKernels, weight: Tensor, num_threads: int = 0) -> None:
    """Interleave rows of weight [N, K] in place; rows are whole 32-bit words. Where they fill no panel, its
    memory without room for it is exchanged. num_threads: 0: torch's.
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
    """Bytes of a row that stay together when it is packed."""
    return 2 if weight.dtype is torch.float16 else 4


def round_up(rows: int) -> int:
    """Rows of whole panels."""
    return -(-rows // PANEL) * PANEL


class NativeTakeRows:
    """Rows of a table by their numbers: embeddings, and the tokens whose hidden states are wanted."""

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
        """table [N, K], packed as `pack` does it or plain, rows of whole words of 32 bits; index [T] int64,
        below N -> [T, K]. row_scale [N] float32: the table is of int8, and rows times it become dtype.
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
    """Tell whether rows of table [N, K] are what NativeTakeRows takes."""
    return table.shape[1] * table.element_size() % 4 == 0


class RotaryAngles:
    """Positions to cosines and sines, as rope_cos_sin has them, times an amplitude."""

    def __init__(self, kernels: NativeKernels, frequencies: Tensor, amplitude: Tensor | None) -> None:
        """frequencies [D / 2] float32, radians per position; amplitude [D] float32."""
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
        """positions [T] int64 -> [T, D] float32."""
        assert positions.is_contiguous()
        out = torch.empty(positions.shape[0], 2 * self._half)
        call = self._call
        call.positions = positions.data_ptr()
        call.out = out.data_ptr()
        call.num_tokens = positions.shape[0]
        self._run(call)
        return out


class PackedLinear:
    """x @ weight.T + bias over a packed weight. A row's result is the same bits beside any other rows."""

    batch_invariant = True
    packs_weight = True

    def __init__(
        self, kernels: NativeKernels, weight: Tensor, bias: Tensor | None, *, out_dtype: torch.dtype
    ) -> None:
        """weight [N, K] packed, bias [N] of its dtype. The sum is float32 and is rounded once, to out_dtype:
        the weight's or float32.
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
        """x [T, K] of the weight's dtype -> [T, N] out_dtype, in `out` if it is given."""
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
        """Return memory for so many rows of the output."""
        return torch.empty(num_rows, self._width, dtype=self._out_dtype)

    def gated(self, activation: Activation) -> PackedLinear | None:
        """This layer and Activate(activation, has_up=True) behind it as one operator of the same bits: [T, K]
        -> [T, N / 2]. None where there is no such kernel.
        """
        n, dtype = self._call.n, self._kept[0].dtype
        if n % (2 * PANEL) or self._out_dtype is not dtype or activation not in NATIVE_ACTIVATIONS:
            return None
        gated = PackedLinear(self._kernels, *self._kept, out_dtype=self._out_dtype)
        gated._width = n // 2
        gated._call.gate = 1 + NATIVE_ACTIVATIONS.index(activation)
        return gated


class NativeNorm:
    """An RMS norm or, with centers, a layer norm over the last dimension, N, a multiple of LANES."""

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
        """weight and bias [N] or [heads, N], float32 or the input's dtype. is_wide: they come before the
        rounding; else the weight multiplies what is rounded.
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
        """x [T, N] or [T, heads, N], whose tokens may lie apart -> its norm, contiguous.

        With residual [T, N]: x is added to it in place, and the norm is of the sum.
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
        """Add update, normed by update_norm if there is one, to residual in place -> the norm of the sum."""
        return self(update if update_norm is None else update_norm(update), residual)


class Activate:
    """A feed-forward layer's activation, alone or as a gate."""

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
        """[T, I] -> activation(x); with has_up [T, 2 * I], gate, then up -> activation(gate) * up; in `out`
        if it is given. I is a multiple of LANES.
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
    """See kernels/combine.py, whose arguments it has."""

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
        """x, add and out [T, N], contiguous and of one dtype."""
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
