"""SamplingColumns: the sampling parameters of each row, set once per stay, and which features it needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model_worker.device.base import Device
from runtime.wire.format import TOKEN_BYTES, IntArray, unpack_ids
from runtime.wire.plan import RowSetup

LongArray: TypeAlias = npt.NDArray[np.int64]
FeatureArray: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint16]]

# Bits of `features`. A row without any is greedy and plain.
NOISE = 1 << 0
TOP_K = 1 << 1
TOP_P = 1 << 2
MIN_P = 1 << 3
PENALTY = 1 << 4
BIAS = 1 << 5
MIN_LEN = 1 << 6
LOGPROBS = 1 << 7
LOGITS = 1 << 8
ALLOWED = 1 << 9
BAD_WORDS = 1 << 10
NGRAM = 1 << 11
HISTORY = 1 << 12  # something looks at the order of the row's tokens
TOP_P_DECAY = 1 << 13
EDITS = PENALTY | BIAS
FORBIDS = MIN_LEN | BAD_WORDS | NGRAM
CHANGES = EDITS | ALLOWED | FORBIDS  # the logits, before the draw
REMEMBERS = PENALTY | HISTORY | TOP_P_DECAY

IN_PROMPT = 1 << 30
"""Bit of a count of the tokens of a row (PenaltyCounts): the prompt holds the token."""
TRUNCATES = TOP_K | TOP_P | MIN_P
DRAWABLE = NOISE | TRUNCATES  # all that a row needs is a draw

GREEDY_BELOW = 1e-5  # temperature


@dataclass(slots=True)
class SampleRows:
    """Whose tokens are sampled, on the device and on the host: [S] int64 each."""

    rows: Tensor
    positions: Tensor  # of the token to be sampled, from the start of the sequence
    rows_host: LongArray
    positions_host: LongArray


class SamplingColumns:
    """Columns by row: what decides the work is on the host, what enters the arithmetic on the device."""

    def __init__(self, max_rows: int, vocab_size: int, device: Device) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self.features = np.zeros(max_rows, np.uint16)
        self.min_len_host = np.zeros(max_rows, np.int64)
        self.num_logprobs = np.full(max_rows, -1, np.int64)
        self.max_top_k = np.zeros(max_rows, np.int64)
        self.ngram = np.zeros(max_rows, np.int64)
        # On the device the last row is nobody's, for the padding of a batch: greedy and harmless.
        self.floats = torch.ones((max_rows + 1, 8), dtype=torch.float32, device=device.torch_device)
        self.integers = torch.zeros((max_rows + 1, 5), dtype=torch.int64, device=device.torch_device)
        # Views: one upload fills several columns.
        self.temperature, self.top_p, self.top_p_decay, self.top_p_min = self.floats[:, :4].unbind(1)
        self.min_logit_gap, self.repetition, self.presence, self.frequency = self.floats[:, 4:].unbind(1)
        self.seed, self.top_k, self.top_p_age, self.is_greedy, self.min_len = self.integers.unbind(1)
        self.is_greedy[max_rows] = 1

    def open_rows(self, setups: Sequence[RowSetup]) -> None:
        """Replace what the rows' last tenants left. Ids that the vocabulary does not have are ignored."""
        for setup in setups:
            self._open_on_host(setup)
        rows = self._device.tensor(np.array([s.row for s in setups], np.int64))
        self.floats[rows] = self._device.tensor(np.array([_floats_of(s) for s in setups], np.float32))
        self.integers[rows] = self._device.tensor(np.array([_integers_of(s) for s in setups], np.int64))

    def _open_on_host(self, setup: RowSetup) -> None:
        row = setup.row
        self.features[row] = _features_of(setup)
        self.min_len_host[row] = setup.min_len
        self.num_logprobs[row] = setup.num_logprobs
        self.max_top_k[row] = max(setup.top_k, 0)
        self.ngram[row] = setup.no_repeat_ngram
        if setup.stop_ids:
            stop_ids = self.known_ids(setup.stop_ids)
            if len(stop_ids) >= self._vocab_size and len(np.unique(stop_ids)) == self._vocab_size:
                self.features[row] &= ~np.uint16(MIN_LEN)  # nothing would be left

    def known(self, ids: IntArray) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which of ids the vocabulary has: an index outside it would stop the whole device."""
        return (ids >= 0) & (ids < self._vocab_size)

    def known_ids(self, packed: bytes) -> IntArray:
        """Packed ids, less those that the vocabulary does not have."""
        ids = unpack_ids(packed)
        return ids[self.known(ids)]


def _features_of(s: RowSetup) -> int:
    features = 0
    if s.repetition_penalty != 1.0 or s.presence_penalty != 0.0 or s.frequency_penalty != 0.0:
        features |= PENALTY
    if s.bias_ids:
        features |= BIAS
    if s.stop_ids:
        features |= MIN_LEN
    if s.num_logprobs >= 0:
        features |= LOGPROBS
    if s.returns_logits:
        features |= LOGITS
    if s.allowed_ids:
        features |= ALLOWED
    if s.bad_words:
        features |= BAD_WORDS
        if any(len(word) > TOKEN_BYTES for word in s.bad_words):
            features |= HISTORY
    if s.no_repeat_ngram:
        features |= NGRAM | HISTORY
    if s.temperature >= GREEDY_BELOW:
        features |= _features_of_draw(s)
    return features


def _features_of_draw(s: RowSetup) -> int:
    features = NOISE
    if s.top_k > 0:
        features |= TOP_K
    if s.top_p < 1.0:
        features |= TOP_P
    if s.min_p > 0.0:
        features |= MIN_P
    if s.top_p_decay != 1.0:
        features |= TOP_P | TOP_P_DECAY
    return features


def _floats_of(setup: RowSetup) -> tuple[float, ...]:
    return (
        max(setup.temperature, GREEDY_BELOW),
        setup.top_p,
        setup.top_p_decay,
        # Only a decay is limited by it.
        setup.top_p_min if setup.top_p_decay != 1.0 else 0.0,
        math.log(setup.min_p) if setup.min_p > 0.0 else -math.inf,
        setup.repetition_penalty,
        setup.presence_penalty,
        setup.frequency_penalty,
    )


def _integers_of(setup: RowSetup) -> tuple[int, ...]:
    is_greedy = setup.temperature < GREEDY_BELOW
    return setup.seed, max(setup.top_k, 0), setup.top_p_age, is_greedy, setup.min_len


def rows_with(features: FeatureArray, bits: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Indices of the entries that have one of `bits`."""
    return np.flatnonzero(features & bits)


def take(column: Tensor, rows: Tensor) -> Tensor:
    """A column's entries for rows [n], contiguous."""
    return column.index_select(0, rows)
