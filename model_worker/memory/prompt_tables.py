"""PromptTables: vectors that stand in prompts in the place of tokens, by slot, and which rows have which.

An id from the vocabulary's size on is a row of its own row's table. A step that has one is not recorded: it
is part of a prompt, which is computed once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from model_worker.device.base import Device
from runtime.wire.format import IntArray, unpack_ids
from runtime.wire.plan import NO_ADAPTER, BatchPlan, RowSetup


class VirtualTokens(NamedTuple):
    """Virtual tokens of a step."""

    where: Tensor
    """Places [n] int64 where they stand among the step's tokens."""
    vectors: Tensor
    """Vectors [n, hidden size] that stand there."""


class PromptTables:
    """Tables of vectors by slot. Asked in the thread of the forward, but for `pack`."""

    def __init__(
        self, device: Device, max_rows: int, vocab_size: int, width: int, dtype: torch.dtype
    ) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._width = width
        self._dtype = dtype
        self._slots = np.full(max_rows + 1, NO_ADAPTER)  # of each row; the last one is nobody's
        self._tables: dict[int, Tensor] = {}

    @property
    def width(self) -> int:
        """Numbers in a vector."""
        return self._width

    def pack(self, table: Tensor) -> Tensor:
        """Bring a table [k, width] into the form that is computed with, in any thread."""
        return table.to(self._dtype).to(self._device.torch_device)

    def install(self, slot: int, table: Tensor | None) -> None:
        """Compute rows of this slot with it, or with nothing, from now on; between two steps."""
        self._tables.pop(slot, None)
        if table is not None:
            self._tables[slot] = table

    def open_rows(self, setups: tuple[RowSetup, ...]) -> None:
        """Note the tables of rows that have new holders."""
        for setup in setups:
            self._slots[setup.row] = setup.prompt_slot

    def are_in(self, plan: BatchPlan) -> bool:
        """Tell whether a step has virtual tokens."""
        ids = unpack_ids(plan.input_ids)
        return bool(self._tables) and len(ids) > 0 and bool(ids.max() >= self._vocab_size)

    def take(self, plan: BatchPlan, input_ids: Tensor) -> VirtualTokens:
        """Return the virtual tokens of a step that has some, and put another id in their place. The rows of
        its setups are open.
        """
        ids = unpack_ids(plan.input_ids)
        index = np.flatnonzero(ids >= self._vocab_size)
        slots = self._slots[_rows_of_tokens(plan)[index]]
        vectors = torch.empty((len(index), self._width), dtype=self._dtype, device=self._device.torch_device)
        for slot in np.unique(slots).tolist():
            of_slot = np.flatnonzero(slots == slot)
            numbers = (ids[index[of_slot]] - self._vocab_size).astype(np.int64)
            vectors[self._device.tensor(of_slot)] = self._tables[slot][self._device.tensor(numbers)]
        where = self._device.tensor(index)
        input_ids[where] = 0
        return VirtualTokens(where, vectors)


def _rows_of_tokens(plan: BatchPlan) -> IntArray:
    lens = np.ones(len(unpack_ids(plan.rows)), np.int64)
    lens[plan.num_decodes :] = unpack_ids(plan.lens)
    rows: IntArray = np.repeat(unpack_ids(plan.rows), lens)
    return rows
