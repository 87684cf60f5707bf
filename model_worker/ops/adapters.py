"""LoRA adapters of linear layers: the protocols, and the torch implementation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model_worker.attention.cpu_native import NativeStep
from model_worker.attention.forward_batch import ForwardBatch
from model_worker.kernels.linear import LoraPart, add_lora
from model_worker.kernels.native.lora import SortedRows

LongArray = npt.NDArray[np.int64]


class PackedAdapter(Protocol):
    """An adapter's part for one layer, in the form that the forward uses."""

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that it takes."""


class RowAdapters(Protocol):
    """Adapter slot of each row, and the tokens of a step by slot."""

    num_slots: int

    def set_row(self, row: int, slot: int) -> None:
        """Use this slot's adapter for a row's tokens from the next step on; negative: none."""

    def have_any(self, rows: LongArray) -> bool:
        """Return True if one of these rows has an adapter. Never waits for a device."""

    def prepare(self, batch: ForwardBatch) -> None:
        """Sort a step's tokens, once for all layers, after the attention backend's prepare."""


class LayerAdapters(Protocol):
    """Adapters of one linear layer by slot."""

    batch_invariant: bool

    def pack(self, slot: int, parts: Sequence[LoraPart]) -> PackedAdapter:
        """Convert an adapter to the form that the forward uses, for a slot that no step reads. May be called
        in any thread.
        """

    def install(self, slot: int, packed: Any) -> None:
        """Use the result of `pack` (None: nothing) for rows of this slot from now on. Call it between two
        steps.
        """

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Add the outputs of the rows' adapters for x [T, K] to y [T, N], in place."""


class AdaptedProduct:
    """A linear layer (see Product) with the addition of adapters."""

    def __init__(self, product: Any, adapters: LayerAdapters) -> None:
        self.product = product
        self.adapters = adapters
        self.packs_weight: bool = product.packs_weight
        self.batch_invariant: bool = product.batch_invariant and adapters.batch_invariant

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, N] for x [T, K]."""
        return self.adapters(x, self.product(x))


class RowSlots:
    """Slots of rows on the host; see RowAdapters."""

    def __init__(self, max_rows: int, num_slots: int) -> None:
        self.num_slots = num_slots
        self.slots = np.full(max_rows + 1, -1)  # the last row belongs to no request

    def set_row(self, row: int, slot: int) -> None:
        """Use this slot's adapter for a row's tokens from the next step on; negative: none."""
        self.slots[row] = slot

    def have_any(self, rows: LongArray) -> bool:
        """Return True if one of these rows has an adapter. Never waits for a device."""
        return bool((self.slots[rows] >= 0).any())


class TorchRows(RowSlots):
    """RowAdapters by torch."""

    def __init__(self, max_rows: int, num_slots: int) -> None:
        super().__init__(max_rows, num_slots)
        self._groups: list[tuple[int, Tensor]] = []

    def prepare(self, batch: ForwardBatch) -> None:
        """Sort a step's tokens, once for all layers, after the attention backend's prepare."""
        slots = np.repeat(self.slots[batch.rows.cpu().numpy()], np.diff(batch.query_start))
        self._groups = [
            (slot, torch.from_numpy(np.flatnonzero(slots == slot)).to(batch.rows.device))
            for slot in sorted({*slots.tolist()})
            if 0 <= slot < self.num_slots
        ]

    def groups(self) -> Iterable[tuple[int, Tensor]]:
        """Yield the slots in the step, each with its tokens [R] int64."""
        return self._groups


class NativeRows(SortedRows):
    """RowAdapters by C++ kernels."""

    def have_any(self, rows: LongArray) -> bool:
        """Return True if one of these rows has an adapter. Never waits for a device."""
        return bool((self.slots_host[rows] >= 0).any())

    def prepare(self, batch: ForwardBatch) -> None:
        """Sort a step's tokens, once for all layers, after the attention backend's prepare."""
        step = batch.attn_metadata
        assert isinstance(step, NativeStep), "who has these kernels has their attention, prepared before"
        self.sort(batch.rows, step.query_start, len(batch.input_ids))


class TorchPacked:
    """PackedAdapter of torch: the adapter as it was loaded."""

    def __init__(self, parts: Sequence[LoraPart]) -> None:
        self.parts = tuple(parts)

    @property
    def num_bytes(self) -> int:
        return sum(part.a.nbytes + part.b.nbytes for part in self.parts)


class TorchAdapters:
    """LayerAdapters by torch."""

    batch_invariant = False

    def __init__(self, rows: TorchRows | NativeRows) -> None:
        self._rows = rows
        self._packed: dict[int, TorchPacked] = {}

    def pack(self, slot: int, parts: Sequence[LoraPart]) -> TorchPacked:
        """Convert an adapter to the form that the forward uses, for a slot that no step reads. May be called
        in any thread.
        """
        return TorchPacked(parts)

    def install(self, slot: int, packed: TorchPacked | None) -> None:
        """Use the result of `pack` (None: nothing) for rows of this slot from now on. Call it between two
        steps.
        """
        self._packed.pop(slot, None)
        if packed is not None:
            self._packed[slot] = packed

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Add the outputs of the rows' adapters for x [T, K] to y [T, N], in place."""
        for slot, rows in self._rows.groups():
            if (packed := self._packed.get(slot)) is not None:
                add_lora(x, y, rows, packed.parts)
        return y
