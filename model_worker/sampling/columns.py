"""SamplingColumns: the sampling parameters of each row, set once per stay, and which features it needs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from model_worker.device.base import Device
from runtime.messages import RowSetup
from runtime.wire import FloatArray, IntArray, unpack_floats, unpack_ids

# Bits of `features`. A row without any is greedy and plain.
NOISE = 1
TOP_K = 2
TOP_P = 4
MIN_P = 8
PENALTY = 16
BIAS = 32
MIN_LEN = 64
LOGPROBS = 128
EDITS = PENALTY | BIAS | MIN_LEN

GREEDY_BELOW = 1e-5  # temperature


class SamplingColumns:
    """Columns [max_rows]: what decides the work is on the host, what enters the arithmetic on the device."""

    def __init__(self, max_rows: int, vocab_size: int, device: Device) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self.features = np.zeros(max_rows, np.uint8)
        self.min_len = np.zeros(max_rows, np.int64)
        self.num_logprobs = np.full(max_rows, -1, np.int64)
        self.max_top_k = np.zeros(max_rows, np.int64)
        self.stop_ids: dict[int, IntArray] = {}
        self.bias: dict[int, tuple[IntArray, FloatArray]] = {}
        self.floats = torch.zeros((max_rows, 6), dtype=torch.float32, device=device.torch_device)
        self.integers = torch.zeros((max_rows, 2), dtype=torch.int64, device=device.torch_device)
        # Views: one upload fills several columns.
        self.temperature, self.top_p, self.min_logit_gap = self.floats[:, :3].unbind(1)
        self.repetition, self.presence, self.frequency = self.floats[:, 3:].unbind(1)
        self.seed, self.top_k = self.integers.unbind(1)

    def open_rows(self, setups: Sequence[RowSetup]) -> None:
        """Replace what the rows' last tenants left. Ids that the vocabulary does not have are ignored."""
        for setup in setups:
            self._open_on_host(setup)
        rows = self._device.tensor(np.array([s.row for s in setups], np.int64))
        self.floats[rows] = self._device.tensor(np.array([_floats_of(s) for s in setups], np.float32))
        self.integers[rows] = self._device.tensor(
            np.array([(s.seed, max(s.top_k, 0)) for s in setups], np.int64)
        )

    def _open_on_host(self, setup: RowSetup) -> None:
        row = setup.row
        self.features[row] = _features_of(setup)
        self.min_len[row] = setup.min_len
        self.num_logprobs[row] = setup.num_logprobs
        self.max_top_k[row] = max(setup.top_k, 0)
        self.stop_ids.pop(row, None)
        self.bias.pop(row, None)
        if setup.stop_ids:
            stop_ids = unpack_ids(setup.stop_ids)
            self.stop_ids[row] = stop_ids[self.known(stop_ids)]
        if setup.bias_ids:
            ids, values = unpack_ids(setup.bias_ids), unpack_floats(setup.bias_values)
            known = self.known(ids)
            self.bias[row] = (ids[known], values[known])

    def known(self, ids: IntArray) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which of ids the vocabulary has: an index outside it would stop the whole device."""
        return (ids >= 0) & (ids < self._vocab_size)


def _features_of(setup: RowSetup) -> int:
    penalised = (
        setup.repetition_penalty != 1.0 or setup.presence_penalty != 0.0 or setup.frequency_penalty != 0.0
    )
    features = [
        (PENALTY, penalised),
        (BIAS, bool(setup.bias_ids)),
        (MIN_LEN, bool(setup.stop_ids)),
        (LOGPROBS, setup.num_logprobs >= 0),
    ]
    if setup.temperature >= GREEDY_BELOW:
        features += [
            (NOISE, True),
            (TOP_K, setup.top_k > 0),
            (TOP_P, setup.top_p < 1.0),
            (MIN_P, setup.min_p > 0.0),
        ]
    return sum(bit for bit, wanted in features if wanted)


def _floats_of(setup: RowSetup) -> tuple[float, ...]:
    return (
        max(setup.temperature, GREEDY_BELOW),
        setup.top_p,
        math.log(setup.min_p) if setup.min_p > 0.0 else -math.inf,
        setup.repetition_penalty,
        setup.presence_penalty,
        setup.frequency_penalty,
    )


def rows_with(
    features: np.ndarray[tuple[int], np.dtype[np.uint8]], bits: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Indices of the entries that have one of `bits`."""
    return np.flatnonzero(features & bits)


def take(column: Tensor, rows: Tensor) -> Tensor:
    """A column's entries for rows [n], contiguous."""
    return column.index_select(0, rows)
