"""DraftTokens: guesses among a step's input, and which of the tokens sampled beside them count.

A row with k guesses has k + 1 places among those that a step samples at: one before each guess and one
behind the last. A guess is accepted while what was sampled at the place before it is the same id; the first
place that is followed by another id, or by no guess, gives the row's last token of the step. No draw is
changed: the token at a place is a function of logits, seed and position, so it is what would come without
the guesses.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model_worker.device.base import Device

NO_GUESS = -1
_Places: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]
Counts: TypeAlias = np.ndarray[tuple[int], np.dtype[np.bool_]]


def first_places(guesses: npt.NDArray[np.int64]) -> _Places:
    """Each row's first place. guesses [S]: the id behind each place, NO_GUESS behind a row's last one."""
    ends = np.flatnonzero(guesses == NO_GUESS) + 1
    return np.concatenate([[0], ends[:-1]])


def places_that_count(tokens: npt.NDArray[Any], guesses: npt.NDArray[np.int64]) -> Counts:
    """Tell for tokens [S] whether all guesses of their row before them are right. guesses: as first_places
    has them.
    """
    differs = tokens != guesses
    wrong_before = np.cumsum(differs) - differs
    counts: Counts = wrong_before == wrong_before[_first_of(guesses)]
    return counts


def _first_of(guesses: npt.NDArray[np.int64]) -> _Places:
    """Place [S] of the first one of each place's row."""
    firsts = first_places(guesses)
    return np.repeat(firsts, np.diff(firsts, append=len(guesses)))


class DraftTokens:
    """Guesses of a step that samples at S places, a row's one behind the other."""

    __slots__ = ("_device", "guesses")

    def __init__(self, guesses: npt.NDArray[np.int64], device: Device) -> None:
        """guesses: as first_places has them."""
        self.guesses = guesses
        self._device = device

    def last_tokens_of(self, rows: Tensor, tokens: Tensor, nobody: int) -> Tensor:
        """Table rows [S] int64 where a place has its row's last token, and `nobody` at all others; as
        places_that_count finds them, but on the device alone.
        """
        guesses, first_of = self._device.tensor(np.stack([self.guesses, _first_of(self.guesses)]))
        differs = tokens != guesses
        wrong_before = differs.cumsum(0) - differs.long()
        is_last = differs & (wrong_before == wrong_before[first_of])
        return rows.where(is_last, torch.full_like(rows, nobody))
