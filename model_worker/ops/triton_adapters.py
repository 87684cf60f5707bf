"""LoRA adapters of linear layers by Triton kernels: tables of all slots on the device, and the slots of rows.

The tables are allocated at the start, for as many adapters of the largest rank as the settings allow, because
recorded steps read them and the KV cache gets the remaining memory. A thread beside the steps writes an
adapter's matrices into a slot that no row uses. Once its figures are written, rows of the slot use the
adapter.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from model_worker.attention.forward_batch import ForwardBatch
from model_worker.kernels.linear import LoraPart
from model_worker.kernels.triton.experts import Tiles
from model_worker.kernels.triton.lora import BLOCK_R, NUM_FIGURES, add_lora, sorted_by_slot
from model_worker.ops.adapters import RowSlots


class TritonRows(RowSlots):
    """RowAdapters by Triton kernels."""

    def __init__(self, max_rows: int, num_slots: int, device: torch.device | str) -> None:
        super().__init__(max_rows, num_slots)
        self.device = device
        self.tiles: Tiles | None = None
        """The step's tokens by slot; None if none of them has an adapter."""
        self._on_device = torch.full((max_rows + 1,), num_slots, dtype=torch.int32, device=device)

    def set_row(self, row: int, slot: int) -> None:
        """Use this slot's adapter for a row's tokens from the next step on; negative: none."""
        if slot != self.slots[row]:
            self._on_device[row].fill_(slot if 0 <= slot < self.num_slots else self.num_slots)
            super().set_row(row, slot)

    def prepare(self, batch: ForwardBatch) -> None:
        """Sort a step's tokens, once for all layers, after the attention backend's prepare."""
        self.tiles = None
        if batch.adapter_rows is not None:
            self.tiles = sorted_by_slot(self._on_device[batch.adapter_rows], self.num_slots)


class TritonPacked:
    """PackedAdapter of Triton. Its matrices are already in the slot."""

    def __init__(self, modules: Tensor, num_bytes: int) -> None:
        self.modules = modules  # [M, NUM_FIGURES] on the host
        self._num_bytes = num_bytes

    @property
    def num_bytes(self) -> int:
        return self._num_bytes


class TritonAdapters:
    """LayerAdapters by Triton kernels."""

    batch_invariant = False

    def __init__(
        self,
        rows: TritonRows,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        max_rank: int,
        max_parts: int,
    ) -> None:
        self._rows = rows
        slots, room, at = rows.num_slots, -(-max_rank // BLOCK_R) * BLOCK_R, rows.device
        self._a = torch.empty((slots, max_parts * room, in_features), dtype=dtype, device=at)
        self._b = torch.empty((slots, out_features, room), dtype=dtype, device=at)
        self._modules = torch.zeros((slots, max_parts, NUM_FIGURES), dtype=torch.float32, device=at)
        self._filled = np.zeros(slots, bool)

    def pack(self, slot: int, parts: Sequence[LoraPart]) -> TritonPacked:
        """Write an adapter's matrices into a slot that no step reads. May be called in any thread."""
        room, device = self._b.shape[2], self._b.device
        modules = torch.zeros(self._modules.shape[1:])
        num_bytes = 0
        for index, part in enumerate(parts):
            rank, end = len(part.a), part.column + len(part.b)
            self._a[slot, index * room : index * room + rank].copy_(part.a)
            self._b[slot, part.column : end, :rank].copy_(part.b)
            modules[index] = torch.tensor([rank, part.column, end, part.scaling])
            num_bytes += self._a.itemsize * (part.a.numel() + part.b.numel())
        if device.type == "cuda":
            modules = modules.pin_memory()
            torch.cuda.current_stream(device).synchronize()
        return TritonPacked(modules, num_bytes)

    @torch.inference_mode()
    def install(self, slot: int, packed: TritonPacked | None) -> None:
        """Use the result of `pack` (None: nothing) for rows of this slot from now on. Call it between two
        steps.
        """
        if packed is not None:
            self._modules[slot].copy_(packed.modules, non_blocking=True)
        elif self._filled[slot]:
            self._modules[slot].zero_()
        self._filled[slot] = packed is not None

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Add the outputs of the rows' adapters for x [T, K] to y [T, N], in place."""
        tiles = self._rows.tiles
        if tiles is not None:
            assert x.stride(-1) == 1
            assert y.is_contiguous()
            add_lora(x, y, self._a, self._b, self._modules, tiles)
        return y
