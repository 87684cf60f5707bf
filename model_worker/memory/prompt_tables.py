"""PromptTables: vectors that replace tokens in prompts (virtual tokens), by slot, and the slot of each row.

An id from the vocabulary's size on is an index into the table of its own row. A step that has one is not
recorded: it is part of a prompt, which is computed once.
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
    """Positions [n] int64 of the virtual tokens among the step's tokens."""
    vectors: Tensor
    """Their vectors [n, hidden size]."""


class PromptTables:
    """Tables of vectors by slot. Used in the forward's thread, except for `pack`."""

    def __init__(
        self, device: Device, max_rows: int, vocab_size: int, width: int, dtype: torch.dtype
    ) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._width = width
        self._dtype = dtype
        self._slots = np.full(max_rows + 1, NO_ADAPTER)  # of each row; the last one belongs to no row
        self._tables: dict[int, Tensor] = {}

    @property
    def width(self) -> int:
        """Number of values in a vector."""
        return self._width

    def pack(self, table: Tensor) -> Tensor:
        """Convert a table [k, width] to the form that the forward uses. May be called in any thread."""
        return table.to(self._dtype).to(self._device.torch_device)

    def install(self, slot: int, table: Tensor | None) -> None:
        """Use this table (None: none) for rows of the slot from now on. Call it between two steps."""
        self._tables.pop(slot, None)
        if table is not None:
            self._tables[slot] = table

    def open_rows(self, setups: tuple[RowSetup, ...]) -> None:
        """Record the tables of rows that have new holders."""
        for setup in setups:
            self._slots[setup.row] = setup.prompt_slot

    def are_in(self, plan: BatchPlan) -> bool:
        """Return True if a step has virtual tokens."""
        ids = unpack_ids(plan.input_ids)
        return bool(self._tables) and len(ids) > 0 and bool(ids.max() >= self._vocab_size)

    def take(self, plan: BatchPlan, input_ids: Tensor) -> VirtualTokens:
        """Return the virtual tokens of a step that has some, and replace them in input_ids by another id. The
        rows of its setups must be open.
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
