"""ThreadChoice: chooses the number of threads for a small step, from measured times of steps of its size.
Knows no kernel.

Threads that share a step wait for each other at the end of each kernel. If another process, such as one that
a token passes through, takes the core of one thread, the others wait for it. Those processes have work at the
beginning of a step, because the step before has just ended. So a short step is faster with one thread fewer,
which leaves a core to the others, in its first part or in all of it. How much depends on the model, the
machine and its other work, so it is measured all the time, from the beginning of one step to that of the
next.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

MAX_TOKENS = 8
"""Tokens of the largest step that is measured. A larger step benefits from each thread."""
SHARES = (0.25, 0.5, 0.75, 1.0)
"""Shares of a step that are tried with one thread fewer."""
TRIAL = 32
"""Steps of one trial, whose mean is used, because a step that waited for its plan is followed by quick ones.
"""
LOOK = 8
"""Steps of a trial between two checks of whether to continue it."""
HOPELESS = 1.1
"""Factor over the best limit's time at which a trial ends early."""
OUTLIERS = 1 / 16
"""Share of a trial's steps, the longest ones, that are ignored; at least one step."""
SHRINK = 0.997
"""Factor that the stored times of other limits are multiplied by at each trial, so that each is tried again,
near ones soon.
"""
GAIN = 0.97
"""Fewer threads are used if a step then takes less than this share of its time with all of them."""


class Limit(NamedTuple):
    threads: int
    """Maximum number of threads for the first `share` of a step. All threads compute the rest."""
    share: float


class ThreadChoice:
    def __init__(self, most: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """most: number of threads."""
        self._limits = limits(most)
        self._clock = clock
        self._sizes: dict[int, _Size] = {}
        self._began = 0.0
        self._rows = b""
        self._size: _Size | None = None

    def begin_step(self, rows: bytes, num_tokens: int) -> Limit:
        """Return the limit for the step that begins now, with these rows and num_tokens tokens.

        NOTE: the time until the next step only counts if that has the same rows. Otherwise the worker may
        have been idle in between.
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
    """Return the limits to try: none; one thread fewer in part of the step; half of the threads."""
    found = [Limit(most, 0.0)]
    if most > 1:
        found += [Limit(most - 1, share) for share in SHARES]
    if most > 3:
        found.append(Limit(most // 2, 1.0))
    return found


class _Size:
    """Measurements of steps of about one size."""

    def __init__(self, limits: list[Limit]) -> None:
        self.limit = limits[0]
        self._limits = limits
        self._seconds: dict[Limit, float] = {}
        self._trial: list[float] = []

    def note(self, seconds: float) -> None:
        """Record the time of a step with `limit`."""
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
