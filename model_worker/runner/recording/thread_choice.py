"""ThreadChoice: how many threads compute a small step, by what steps of its size have taken. Knows no kernel.

Threads that share a step wait for each other at the end of each kernel, and processes beside them, such as
those that a token goes through, take one of them in the middle of its work: the others then wait for that
one. Those processes have their work while a step begins, because the step before it has just ended. So where
a step is short, it is faster by one thread fewer, and a core for the others, in its first part or in all of
it. That depends on the model, the machine and on what else it does: it is measured all the time, from the
beginning of one step to that of the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

MAX_TOKENS = 8
"""Tokens of the largest step that is looked at; for a larger one each thread is worth having."""
SHARES = (0.25, 0.5, 0.75, 1.0)
"""Shares of a step that are tried with one thread fewer."""
TRIAL = 32
"""Steps with one limit, whose mean counts: after one that waited for its plan come quick ones."""
LOOK = 8
"""Steps of a trial between two looks at whether it is worth going on with."""
HOPELESS = 1.1
"""A trial ends early once its steps take so many times what the best limit has taken."""
OUTLIERS = 1 / 16
"""Share of a trial's steps, the longest ones, which do not count; at least one step."""
SHRINK = 0.997
"""Factor of what other limits have taken, at each trial of one: so each has its turn, near ones soon."""
GAIN = 0.97
"""Fewer threads are taken where a step takes less than this share of its time with all of them."""


class Limit(NamedTuple):
    threads: int
    """Most that compute the first `share` of a step; all threads compute the rest."""
    share: float


class ThreadChoice:
    def __init__(self, most: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """most: threads that there are."""
        self._limits = limits(most)
        self._clock = clock
        self._sizes: dict[int, _Size] = {}
        self._began = 0.0
        self._rows = b""
        self._size: _Size | None = None

    def begin_step(self, rows: bytes, num_tokens: int) -> Limit:
        """Return what holds for the step that begins now, of those rows and tokens.

        NOTE: what passes until the step after it counts only if that has the same rows: else nobody may have
        asked for anything meanwhile.
        """
        if num_tokens > MAX_TOKENS or len(self._limits) == 1:
            self._size = None
            return self._limits[0]
        now = self._clock()
        if self._size is not None and self._rows == rows:
            self._size.note(now - self._began)
        size = self._sizes.get(num_tokens.bit_length())
        if size is None:
            size = self._sizes[num_tokens.bit_length()] = _Size(self._limits)
        self._size, self._rows, self._began = size, rows, now
        return size.limit


def limits(most: int) -> list[Limit]:
    """None; one thread fewer in a part of the step; half of them."""
    found = [Limit(most, 0.0)]
    if most > 1:
        found += [Limit(most - 1, share) for share in SHARES]
    if most > 3:
        found.append(Limit(most // 2, 1.0))
    return found


class _Size:
    """Steps of about one size, and what they have taken."""

    def __init__(self, limits: list[Limit]) -> None:
        self.limit = limits[0]
        self._limits = limits
        self._seconds: dict[Limit, float] = {}
        self._trial: list[float] = []

    def note(self, seconds: float) -> None:
        """Take what a step with `limit` has taken."""
        self._trial.append(seconds)
        count = len(self._trial)
        if count % LOOK:
            return
        counted = sorted(self._trial)[: -max(1, int(count * OUTLIERS))]
        mean = sum(counted) / len(counted)
        if count == TRIAL or (self._seconds and mean > HOPELESS * min(self._seconds.values())):
            self._trial.clear()
            self._seconds[self.limit] = GAIN * mean if self.limit == self._limits[0] else mean
            for other in self._seconds.keys() - {self.limit}:
                self._seconds[other] *= SHRINK
            self.limit = self._next()

    def _next(self) -> Limit:
        for limit in self._limits:
            if limit not in self._seconds:
                return limit
        return min(self._limits, key=self._seconds.__getitem__)
