"""StepCost: measures what guesses cost in step time, and so how many are worth making.

Decode-only steps are grouped by their number of rows. For each number it keeps the median time of the last
steps without guesses, and how much longer steps with guesses took: a fixed part (such a step is not planned
ahead) and a part for each guess. A guess is worth its cost if its probability of being right is at least the
share of a step's time, per token of the step, that it adds:

    probability  >=  seconds a guess * rows / seconds of a step without guesses

All guesses of a step together must be worth the fixed part, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import combinations
from statistics import median

from scheduler_proc.features.speculation.draft_length import FIRST_RATE, LOWEST_BAR, WEIGHT_FOR_ALL

NUM_KEPT = 9
NUM_MEASURED = 3
"""Number of steps without guesses that are measured before the first with some, and of steps with guesses
before their cost is believed. Otherwise a single delayed step would keep all rows from guessing for a long
time.
"""
TRIAL_GUESSES = 16
"""Number of guesses in a trial step, in total, but at least one for each row. Most of the cost may be that
the step is not planned ahead, which the guesses share.
"""
PLAIN_EVERY = 64
"""Number of steps with guesses after which one without is measured again, because contexts grow."""
PROBE_AFTER = 32
MOST_PROBE_AFTER = 2048
"""Maximum number of steps without guesses before some are tried again, when they cost too much for every row;
the number doubles each time. If they then turn out cheaper, earlier measurements are forgotten: other work on
the machine can make guesses expensive for a while.
"""
MARGIN = 1.25
"""Factor by which the gain of a guess must exceed its cost. Planning is part of the price, and where a step's
time is proportional to its tokens no guess is worth it, however the measured times vary.
"""
MOST_OF_OTHERS = 0.25
"""Largest share by which guesses may prolong a step while rows that do not guess are in it."""
NO_LIMIT = 1 << 16
EXACT_ROWS = 8
"""Number of rows up to which each number has its own group. Above it, groups span eight numbers."""


class _Measured:
    """Measurements of steps with the same number of rows."""

    __slots__ = (
        "any_guess",
        "guessed",
        "is_dear",
        "is_probing",
        "num_since_guess",
        "num_since_plain",
        "per_guess",
        "plain",
        "probe_after",
    )

    def __init__(self) -> None:
        self.plain: deque[float] = deque(maxlen=NUM_KEPT)
        self.guessed: deque[tuple[int, float]] = deque(maxlen=NUM_KEPT)
        """Steps with guesses: (number of guesses, seconds longer than a step without)."""
        self.any_guess = self.per_guess = 0.0
        """Seconds that a step takes longer with any guesses, and in addition for each guess."""
        self.num_since_plain = self.num_since_guess = 0
        self.probe_after = PROBE_AFTER
        self.is_probing = False
        self.is_dear = False
        """True if not even a guess that is certain to be right is worth its cost, so that no row tries one by
        itself.
        """

    def note_guessed(self, num_rows: int, num_guesses: int, seconds: float) -> None:
        plain = median(self.plain)
        if self.is_probing:
            self.is_probing = False
            if MARGIN * num_rows * (seconds - plain) < num_guesses * plain:
                self.guessed.clear()
                self.probe_after = PROBE_AFTER
            else:
                self.probe_after = min(2 * self.probe_after, MOST_PROBE_AFTER)
        self.guessed.append((num_guesses, seconds - plain))
        self.any_guess, self.per_guess = line_through(self.guessed)


def line_through(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return (value at zero, slope) of a line through the points, neither below zero. The slope is the median
    over all pairs of points, so a few outliers do not move it.
    """
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2) if a[0] != b[0]]
    slope = max(0.0, median(slopes)) if slopes else 0.0
    at_zero = median(y - slope * x for x, y in points)
    if not slopes or at_zero < 0.0:
        return 0.0, max(0.0, median(y / x for x, y in points))
    return at_zero, slope


class StepCost:
    """Bounds for the guesses of the next step, from the times of finished steps."""

    def __init__(self) -> None:
        self.bar = 0.0
        """Least probability of being right at which a guess is worth its cost."""
        self.least = 0.0
        """Expected number of right guesses of a row below which none is worth its cost."""
        self.most = 0
        """Maximum number of guesses of a row."""
        self._rate = FIRST_RATE
        self._num_right = self._num_wrong = 0
        """Numbers of right and wrong guesses since the rate was last estimated."""
        self.num_guessing = 0
        """Number of rows that guess. Other running rows must not wait long for them."""
        self._measured: dict[int, _Measured] = {}

    @property
    def rate(self) -> float:
        """Probability that a guess is right, over all requests. New requests begin with it."""
        num_new = self._num_right + self._num_wrong
        if num_new:
            share = self._num_right / num_new
            self._rate = share + (self._rate - share) * (1.0 - WEIGHT_FOR_ALL) ** num_new
            self._num_right = self._num_wrong = 0
        return self._rate

    def note_verified(self, num_drafted: int, num_accepted: int) -> None:
        """Record the verified guesses of a row. Guesses behind the first wrong one say nothing."""
        self._num_right += num_accepted
        self._num_wrong += num_accepted < num_drafted

    def note_all_verified(self, num_accepted: int, num_wrong: int) -> None:
        """Record the guesses of several rows: right guesses in total, and rows with a wrong one."""
        self._num_right += num_accepted
        self._num_wrong += num_wrong

    def note_step(self, num_rows: int, num_guesses: int, seconds: float) -> None:
        """Record a finished step that computed no prompt."""
        self._rate = self.rate  # read now: if several steps have verified guesses, the last one counts most
        size = num_rows if num_rows <= EXACT_ROWS else EXACT_ROWS - num_rows // -EXACT_ROWS
        kept = self._measured.get(size)
        if kept is None:
            kept = self._measured[size] = _Measured()
        if not num_guesses:
            kept.plain.append(seconds)
            kept.num_since_plain = 0
            kept.num_since_guess += 1
            kept.is_probing = kept.is_dear and kept.num_since_guess >= kept.probe_after
        else:
            kept.num_since_plain += 1
            kept.num_since_guess = 0
            if kept.plain:
                kept.note_guessed(num_rows, num_guesses, seconds)
        self._decide(kept, num_rows)

    def _decide(self, kept: _Measured, num_rows: int) -> None:
        self.bar, self.least = LOWEST_BAR, 0.0
        if len(kept.plain) < NUM_MEASURED or kept.num_since_plain >= PLAIN_EVERY:
            self.most = 0
            return
        num_guessing = max(1, self.num_guessing)
        if len(kept.guessed) < NUM_MEASURED or kept.is_probing:
            self.most = 1 if num_guessing < num_rows else max(1, TRIAL_GUESSES // num_rows)
            return
        plain, any_guess, per_guess = median(kept.plain), kept.any_guess, kept.per_guess
        self.most = NO_LIMIT
        if plain > 0.0:
            price = MARGIN * num_rows / plain
            self.bar = max(LOWEST_BAR, price * per_guess)
            self.least = price * any_guess / num_guessing
            if num_guessing < num_rows:
                room = MOST_OF_OTHERS * plain - any_guess
                most = room / per_guess / num_guessing if per_guess > 0.0 else NO_LIMIT
                self.most = int(min(NO_LIMIT, most)) if room > 0.0 else 0
            kept.is_dear = self.bar >= 1.0 or self.least >= 1.0 or not self.most
