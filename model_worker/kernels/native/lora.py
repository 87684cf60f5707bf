"""LoRA adapters by the C++ kernel: the tables that it reads in every step, also in a recorded one."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from model_worker.kernels.linear import LoraPart
from model_worker.kernels.native.calls import LoraCall, LoraSlotTable, SortRowsCall
from model_worker.kernels.native.library import DTYPES, NativeKernels
from model_worker.kernels.native.operators import pack_panels, round_up

MAX_PARTS = 3
WORD_BYTES = 4


class SortedRows:
    """Tokens of a step, sorted by the adapter slot of their row. A row's slot is set when it gets a new
    holder.
    """

    def __init__(self, kernels: NativeKernels, max_rows: int, num_slots: int) -> None:
        self.num_slots = num_slots
        self.order = torch.empty(0, dtype=torch.int32)
        self.begins = torch.zeros(num_slots + 1, dtype=torch.int32)
        self._slots = torch.full((max_rows + 1,), -1, dtype=torch.int32)  # the last row is unused
        self.slots_host = self._slots.numpy()
        self._run = kernels.adapters.sort_rows
        self._call = SortRowsCall(
            row_slots=self._slots.data_ptr(), begins=self.begins.data_ptr(), num_slots=num_slots
        )

    def set_row(self, row: int, slot: int) -> None:
        self.slots_host[row] = slot

    def sort(self, rows: Tensor, query_start: Tensor, num_tokens: int) -> None:
        """Sort a step's tokens. rows [B], query_start [B + 1], both int64: rows and token ranges of the
        step's sequences.
        """
        self.order = torch.empty(num_tokens, dtype=torch.int32)
        call = self._call
        call.rows = rows.data_ptr()
        call.query_start = query_start.data_ptr()
        call.order = self.order.data_ptr()
        call.num_tokens = num_tokens
        call.num_seqs = rows.shape[0]
        self._run(call)

    def groups(self) -> Iterable[tuple[int, Tensor]]:
        """Yield the slots in the step, each with its tokens [R] int64."""
        begins = self.begins.tolist()
        for slot, (begin, end) in enumerate(pairwise(begins)):
            if begin < end:
                yield slot, self.order[begin:end].long()


class PackedLora:
    """An adapter's part for one linear layer, in the kernel's format."""

    def __init__(self, kernels: NativeKernels, parts: Sequence[LoraPart], dtype: torch.dtype) -> None:
        assert 0 < len(parts) <= MAX_PARTS
        words = WORD_BYTES // dtype.itemsize
        self._kept: list[Tensor] = []
        self.slot = LoraSlotTable(num_parts=len(parts))
        hidden = 0
        for part, row in zip(parts, self.slot.parts, strict=False):
            rank = len(part.a) + -len(part.a) % words
            b = _padded(part.b, round_up(len(part.b)), rank, dtype)
            pack_panels(kernels, b, num_threads=1)
            row.b, row.column, row.columns = b.data_ptr(), part.column, len(part.b)
            row.hidden, row.rank, row.scale = hidden, rank, part.scaling
            hidden += rank
            self._kept.append(b)
        a = torch.zeros(round_up(hidden), parts[0].a.shape[1], dtype=dtype)
        for part, row in zip(parts, self.slot.parts, strict=False):
            a[row.hidden : row.hidden + len(part.a)] = part.a
        pack_panels(kernels, a, num_threads=1)
        self.slot.a, self.slot.hidden_size = a.data_ptr(), len(a)
        self._kept.append(a)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._kept)


class NativeLora:
    """Adapters of one linear layer by slot. The result of a row has the same bits in any batch."""

    batch_invariant = True

    def __init__(
        self,
        kernels: NativeKernels,
        rows: SortedRows,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        max_rank: int,
        max_parts: int,
    ) -> None:
        assert max_parts <= MAX_PARTS
        self._kernels = kernels
        self._rows = rows
        self._dtype = dtype
        self._max_hidden = max_parts * round_up(max_rank)
        self._slots = (LoraSlotTable * rows.num_slots)()
        self._packed: dict[int, PackedLora] = {}
        self._run = kernels.adapters.lora
        self._call = LoraCall(
            begins=rows.begins.data_ptr(),
            slots=ctypes.addressof(self._slots),
            n=out_features,
            k=in_features,
            max_hidden=self._max_hidden,
            num_slots=rows.num_slots,
            dtype=kernels.number_of(dtype),
            num_threads=torch.get_num_threads(),
        )

    @property
    def num_tokens(self) -> Tensor:
        """Number of the step's tokens that have an adapter: an int32 that the step's call writes."""
        return self._rows.begins[-1:]

    def pack(self, slot: int, parts: Sequence[LoraPart]) -> PackedLora:
        """Convert an adapter to the kernel's format. May be called in any thread."""
        packed = PackedLora(self._kernels, parts, self._dtype)
        assert packed.slot.hidden_size <= self._max_hidden
        return packed

    def install(self, slot: int, packed: PackedLora | None) -> None:
        """Use this adapter (None: none) for rows of the slot from now on. Call it between two steps."""
        self._slots[slot] = LoraSlotTable() if packed is None else packed.slot
        if packed is None:
            self._packed.pop(slot, None)
        else:
            self._packed[slot] = packed

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Add the outputs of the rows' adapters for x [T, K] to y [T, N], in place."""
        assert x.is_contiguous()
        assert y.is_contiguous()
        hidden = torch.empty(x.shape[0], self._max_hidden, dtype=self._dtype)
        call = self._call
        call.x = x.data_ptr()
        call.y = y.data_ptr()
        call.hidden = hidden.data_ptr()
        call.order = self._rows.order.data_ptr()
        call.num_rows = x.shape[0]
        self._run(call)
        return y


def can_adapt(in_features: int, dtype: torch.dtype) -> bool:
    """Return True if the kernel supports layers with this number of inputs: rows must be whole
    32-bit words.
    """
    return dtype in DTYPES and in_features * dtype.itemsize % WORD_BYTES == 0


def _padded(matrix: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    padded = torch.zeros(rows, columns, dtype=dtype)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    return padded
