"""MaskPatience: says how long a step may wait for its masks. While the worker computes the step's model,
waiting costs nothing; afterwards the worker has nothing to do, and all rows of the step wait.
"""

from __future__ import annotations

from collections.abc import Callable

MAX_WAIT_S = 0.04
"""Seconds for which the worker may be idle if all rows of a step wait for masks of one tenant's guides."""
LEAST_S = 0.002
"""Seconds for which it may be idle in a step with other rows: a message to the grammar process and back on a
busy machine.
"""
USUAL_S = 0.0001
"""Seconds besides for each mask of the step. Masks of usual guides take no longer."""
SHARE = 0.1
"""Share of the time for which it may be idle beyond that."""
MAX_CREDIT_S = 0.04
LOOK_S = 0.001
"""Seconds after which it is looked again whether the worker still computes."""
MAX_COMPUTING_S = 1.0
"""Seconds after which the worker is taken to be idle in any case. Nothing else is done while a step waits."""


def _always() -> bool:
    return True


class MaskPatience:
    """Limit of the time for which steps wait for masks that some of their rows do not need. Time in which
    nobody had to wait for long adds to it.
    """

    def __init__(self) -> None:
        self._is_idle: Callable[[], bool] = _always
        self._began_s = 0.0
        self._idle_s: float | None = None
        """Time from which on the worker waits for the current step's masks; None while it computes."""
        self._usual_s = MAX_WAIT_S
        """Seconds for which it may be idle without credit."""
        self._limit_s = MAX_WAIT_S
        """Seconds for which it may be idle at most."""
        self._credit_s = MAX_CREDIT_S

    def begin(self, now_s: float, num_masks: int, is_idle: Callable[[], bool], *, has_others: bool) -> None:
        """Begin to gather the masks of a step.

        is_idle: returns True if the worker is known to have nothing to compute until the masks come.
        has_others: some rows of the step need no mask, or are of another tenant.
        """
        earned_s = SHARE * max(0.0, now_s - self._began_s)
        self._credit_s = min(MAX_CREDIT_S, self._credit_s + earned_s)
        self._is_idle, self._began_s, self._idle_s = is_idle, now_s, None
        self._usual_s = LEAST_S + USUAL_S * num_masks if has_others else MAX_WAIT_S
        self._limit_s = self._usual_s + (self._credit_s if has_others else 0.0)

    def hurry(self) -> None:
        """Wait from now on only while the worker computes the current step."""
        self._limit_s = 0.0

    def left_s(self, now_s: float) -> float:
        """Return how long to wait before asking again; 0.0 or less: no longer."""
        if self._idle_s is None:
            if not self._is_idle() and now_s < self._began_s + MAX_COMPUTING_S:
                return LOOK_S
            self._idle_s = now_s
        return self._idle_s + self._limit_s - now_s

    def end(self, now_s: float) -> None:
        """End it, and take from the credit what the worker's idle time was beyond the usual."""
        if self._idle_s is not None:
            excess_s = now_s - self._idle_s - self._usual_s
            self._credit_s = max(0.0, self._credit_s - max(0.0, excess_s))
        self._is_idle = _always  # what was asked may hold a step, with its results
