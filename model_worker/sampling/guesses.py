"""Guesses among a step's input, and which of the tokens sampled beside them count. Knows no request, no plan.

A row with k guesses has k + 1 places among the S that a step samples at: one before each guess and one behind
the last. Arrays of guesses [S] int64 say which id is behind each place, NO_GUESS behind a row's last one. A
guess is accepted if the id sampled at the place before it is the same; the first place that is followed by
another id, or by no guess, gives the row's last token of the step. No draw is changed: the token at a place
is a function of logits, seed and position, so it is what would come without the guesses.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model_worker.device.base import Device
from runtime.wire.format import BoolArray, LongArray

NO_GUESS = -1


def first_places(guesses: LongArray) -> LongArray:
    """Return the index of each row's first place."""
    ends = np.flatnonzero(guesses == NO_GUESS) + 1
    return np.concatenate([[0], ends[:-1]])


def _first_of_each(guesses: LongArray) -> LongArray:
    """Return [S] for each place the index of its row's first place."""
    firsts = first_places(guesses)
    return np.repeat(firsts, np.diff(firsts, append=len(guesses)))


def places_that_count(tokens: npt.NDArray[Any], guesses: LongArray) -> BoolArray:
    """Return a mask [S]: True if all guesses of the row before this place equal the sampled tokens."""
    differs = tokens != guesses
    wrong_before = np.cumsum(differs) - differs
    counts: BoolArray = wrong_before == wrong_before[_first_of_each(guesses)]
    return counts


def rows_that_end(guesses: LongArray, rows: Tensor, tokens: Tensor, nobody: int, device: Device) -> Tensor:
    """Return [S] int64: the table row at the place with the row's last valid token of the step, and `nobody`
    at all other places. Computed like places_that_count, but on the device.
    """
    ids, first = device.tensor(np.stack([guesses, _first_of_each(guesses)]))
    differs = tokens != ids
    wrong_before = differs.cumsum(0) - differs.long()
    is_last = differs & (wrong_before == wrong_before[first])
    return rows.where(is_last, torch.full_like(rows, nobody))
