"""Matchers for the grammar process's own Branches, in the guides of the simulation."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from grammar_proc.branches import Branches
from runtime.wire.format import IntArray
from tests.harness.simulation.fake_sampling import VOCAB_SIZE
from tests.harness.simulation.sim_grammar import place_in

_live: weakref.WeakSet[FakeMatcher] = weakref.WeakSet()
_numbers = itertools.count()


class FakeMatcher:
    """Place of one hypothesis in a guide."""

    def __init__(self, guide: str, ids: Sequence[int] = ()) -> None:
        self.guide = guide
        self.ids = list(ids)
        self.number = next(_numbers)
        _live.add(self)

    def deep_copy(self) -> FakeMatcher:
        return FakeMatcher(self.guide, self.ids)

    def consume_tokens(self, ids: list[int]) -> int:
        self.ids += ids
        return len(ids)

    def is_error(self) -> bool:
        return False

    def is_accepting(self) -> bool:
        return place_in(self.guide, self.ids).is_complete


class _Vocabulary:
    def follow(self, start: FakeMatcher, ids: Sequence[int]) -> FakeMatcher:
        return FakeMatcher(start.guide, [*start.ids, *ids])

    def timed_mask(self, matcher: FakeMatcher) -> tuple[IntArray, float]:
        bits = np.zeros(VOCAB_SIZE, np.uint8)
        bits[place_in(matcher.guide, matcher.ids).allowed] = 1
        return np.packbits(bits, bitorder="little").view(np.int32), 0.0


def make_branches() -> Branches:
    vocabulary: Any = _Vocabulary()
    return Branches(vocabulary)


def number_from_now() -> int:
    """Return a number that no matcher has which was made before."""
    return next(_numbers)


def num_matchers(number: int) -> int:
    """Return how many matchers there are that were made since a `number_from_now`. An earlier run that failed
    may have left some, which the collector takes at any time.
    """
    return sum(matcher.number > number for matcher in _live)
