"""DraftLength: how many guesses a row makes, by how often its last ones were right."""

from __future__ import annotations

FIRST_RATE = 0.5
"""Probability that a guess is right, before any was made."""
WEIGHT = 0.25
"""Weight of the newest guess in that estimate, once there were a few."""
FIRST_WEIGHT = 0.5
"""Weight of its very first one: what other requests are like says little of this one."""
FIRST_DRAFTS = 2
"""Guesses of its first step with some, at most."""
WEIGHT_FOR_ALL = 0.02
"""The same in the estimate that new requests begin with."""
SHORTEST_PAUSE = 8
LONGEST_PAUSE = 256


class DraftLength:
    """Number of guesses of one row. A guess counts only if all before it were right, so the j-th has the
    probability rate^j. A row whose guesses are not worth their cost makes none for some steps, then one, and
    so on with longer pauses.
    """

    __slots__ = ("_is_known", "_pause", "_wait", "rate")

    def __init__(self, rate: float = FIRST_RATE) -> None:
        self.rate = rate
        self._is_known = False
        self._pause = SHORTEST_PAUSE
        self._wait = SHORTEST_PAUSE

    def num_drafts(self, most: int, bar: float, least: float = 0.0) -> int:
        """Return how many guesses to make: as many as are as likely as the bar says, and at most `most`; none
        where fewer of them than `least` are likely to be right. The first are few, and made to learn from.
        """
        rate = likely = self.rate
        expected, count = 0.0, 0
        if not self._is_known:
            most, least = min(most, FIRST_DRAFTS), 0.0
        while count < most and likely >= bar:
            count += 1
            expected += likely
            likely *= rate
        if expected < least:
            count = 0
        if count or self._wait or bar >= 1.0:  # then not even a guess that is sure to be right is worth it
            return count
        return min(1, most)

    def note_verified(self, num_drafted: int, num_accepted: int) -> None:
        """Learn from a step that has verified some; guesses behind the first wrong one say nothing."""
        weight = WEIGHT if self._is_known else FIRST_WEIGHT
        self.rate = rate_after(self.rate, num_drafted, num_accepted, weight)
        self._is_known = True
        if not self._wait:
            self._pause = SHORTEST_PAUSE if num_accepted else min(2 * self._pause, LONGEST_PAUSE)
            self._wait = self._pause

    def note_without(self) -> None:
        """Count a step in which it made none towards the pause."""
        if self._wait:
            self._wait -= 1


def rate_after(rate: float, num_drafted: int, num_accepted: int, weight: float) -> float:
    """Return the estimate after so many guesses, of which the first ones were right."""
    keep = 1.0 - weight
    rate = 1.0 - (1.0 - rate) * keep**num_accepted
    return rate if num_accepted == num_drafted else rate * keep
