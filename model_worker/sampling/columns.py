"""SamplingColumns: sampling parameters and feature bits of each row, set once in a stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from model_worker.device.base import Device
from runtime.sampling.columns import FLOATS, INTEGERS, ROW_DTYPE
from runtime.sampling.features import MIN_LEN
from runtime.wire.format import IntArray, LongArray, unpack_ids
from runtime.wire.plan import RowSetup

FeatureArray: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint16]]

IN_PROMPT = 1 << 30
"""Flag in a row's token counts (Penalties): the prompt has the token."""


@dataclass(slots=True)
class SampleRows:
    """Rows whose tokens are sampled, on the device and on the host, [S] int64 each."""

    rows: Tensor
    positions: Tensor  # of the token to be sampled, from the start of the sequence
    rows_host: LongArray
    positions_host: LongArray
    guesses: LongArray | None = None  # see guesses.py; None: there are none, and no row comes twice


class SamplingColumns:
    """Columns by row, as runtime.sampling.table lists them. Columns that decide which code runs are on the
    host, columns for arithmetic on the device. `host` has all of them by name.
    """

    # Written by python -m runtime.sampling.generate: begin.
    temperature: Tensor
    top_p: Tensor
    min_logit_gap: Tensor  # log of min-p: ids further below the largest are cut off
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    top_p_decay: Tensor
    top_p_min: Tensor
    top_n_sigma: Tensor  # ids more standard deviations below the largest are cut off; 0: none
    min_len: Tensor  # no stop id is drawn at a position below it
    is_greedy: Tensor
    top_k: Tensor  # 0: all
    seed: Tensor
    num_logprobs: Tensor  # -1: none; k: the chosen token's and the k most likely ones'
    ngram: Tensor  # size of the n-grams; 0: off
    top_p_age: Tensor  # output tokens since the last reset
    # Written by python -m runtime.sampling.generate: end.

    def __init__(self, max_rows: int, vocab_size: int, device: Device) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self.features = np.zeros(max_rows, np.uint16)
        self._packed = np.zeros(max_rows, ROW_DTYPE)
        host_columns = (*self._packed["floats"].T, *self._packed["integers"].T)
        self.host = {c.name: values for c, values in zip((*FLOATS, *INTEGERS), host_columns, strict=True)}
        # On the device the last row belongs to no request. It pads batches: greedy and harmless.
        self.floats = torch.ones((max_rows + 1, len(FLOATS)), device=device.torch_device)
        self.integers = torch.zeros(
            (max_rows + 1, len(INTEGERS)), dtype=torch.int64, device=device.torch_device
        )
        # Views: one upload fills several columns.
        for c, view in zip((*FLOATS, *INTEGERS), (*self.floats.T, *self.integers.T), strict=True):
            setattr(self, c.name, view)
        self.is_greedy[max_rows] = 1

    def open_rows(self, setups: Sequence[RowSetup]) -> None:
        """Replace the parameters of rows with new holders. Ids outside the vocabulary are ignored."""
        rows_host = np.array([setup.row for setup in setups], np.int64)
        packed = np.frombuffer(b"".join([setup.columns for setup in setups]), ROW_DTYPE)
        self._packed[rows_host] = packed
        rows = self._device.tensor(rows_host)
        self.floats[rows] = self._device.tensor(packed["floats"].astype(np.float32))
        self.integers[rows] = self._device.tensor(packed["integers"].copy())
        for setup in setups:
            self.features[setup.row] = setup.features
            if setup.stop_ids:
                stop_ids = self.known_ids(setup.stop_ids)
                if len(stop_ids) >= self._vocab_size and len(np.unique(stop_ids)) == self._vocab_size:
                    self.features[setup.row] &= ~np.uint16(MIN_LEN)  # it would leave nothing

    def known(self, ids: IntArray) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Return a mask of the ids that are in the vocabulary. An index outside it would stop the whole
        device.
        """
        return (ids >= 0) & (ids < self._vocab_size)

    def known_ids(self, packed: bytes) -> IntArray:
        """Unpack ids, without those outside the vocabulary."""
        ids = unpack_ids(packed)
        return ids[self.known(ids)]


def rows_with(features: FeatureArray, bits: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the indices of the entries that have one of `bits`."""
    return np.flatnonzero(features & bits)


def take(column: Tensor, rows: Tensor) -> Tensor:
    """Return a column's entries for rows [n], contiguous."""
    return column.index_select(0, rows)
