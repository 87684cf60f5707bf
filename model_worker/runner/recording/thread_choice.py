"""ThreadChoice: how many threads compute a small step, by what steps of its size have taken. Knows no kernel.

Threads that share a step wait for each other at the end of each kernel, and processes beside them, such as
those that a token goes through, take one of them in the middle of its work: the others then wait for that
one. Where a step is short, one thread fewer, and a core for the others, is faster. It depends on the model,
the machine and on what else it does, so it is measured all the time, from the beginning of one step to that
of the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable

MAX_TOKENS = 8
"""Tokens of the largest step that is looked at; for a larger one each thread is worth having."""
TRIAL = 32
"""Steps by one number of threads, whose mean counts: after one that waited for its plan come quick ones."""
OUTLIERS = 2
"""Longest steps of a trial, which do not count."""
STAY = 32
"""Trials of the best number, before another one's turn."""
GAIN = 0.97
"""Share of what all threads take, which fewer must stay below."""


class ThreadChoice:
    def __init__(self, most: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """most: threads that there are."""
        self._most = most
        self._clock = clock
        self._sizes: dict[int, _Size] = {}
        self._began = 0.0
        self._rows = b""
        self._size: _Size | None = None

    def begin_step(self, rows: bytes, num_tokens: int) -> int:
        """Return how many threads compute the step that begins now, of those rows and tokens.

        NOTE: what passes until the step after it counts only if that has the same rows: else nobody may have
        asked for anything meanwhile.
        """
        if num_tokens > MAX_TOKENS or self._most == 1:
            self._size = None
            return self._most
        now = self._clock()
        if self._size is not None and self._rows == rows:
            self._size.note(now - self._began)
        size = self._sizes.get(num_tokens.bit_length())
        if size is None:
            size = self._sizes[num_tokens.bit_length()] = _Size(candidates(self._most))
        self._size, self._rows, self._began = size, rows, now
        return size.threads


def candidates(most: int) -> list[int]:
    """All threads, all but one, and half of them."""
    return sorted({most, most - 1, most // 2}, reverse=True)


class _Size:
    """Steps of about one size, and what they have taken."""

    def __init__(self, numbers: list[int]) -> None:
        self.threads = numbers[0]
        self._numbers = numbers
        self._seconds: dict[int, float] = {}
        self._trial: list[float] = []
        self._num_trials = 0

    def note(self, seconds: float) -> None:
        """Take what a step by `threads` has taken."""
        self._trial.append(seconds)
        if len(self._trial) == TRIAL:
            gain = GAIN if self.threads == self._numbers[0] else 1.0
            self._seconds[self.threads] = gain * sum(sorted(self._trial)[:-OUTLIERS])
            self._trial.clear()
            self._num_trials += 1
            self.threads = self._next()

    def _next(self) -> int:
        for number in self._numbers:
            if number not in self._seconds:
                return number
        if self._num_trials % STAY == 0:
            return self._numbers[self._num_trials // STAY % len(self._numbers)]
        return min(self._numbers, key=self._seconds.__getitem__)
