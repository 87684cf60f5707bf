"""RestartBudget: whether what has died is started again, and how soon. Pure counting; knows no process.

All deaths count, so that nothing is started again for ever: those of the last while, and before a death of
what could not get ready all, however long it takes to fail. A pause is of use only before what dies by
itself: the cause may be over by then. What was ended from outside is well, and callers wait for it.
"""

from __future__ import annotations

from collections import defaultdict, deque

BACK_OFF_S = (0.0, 0.1, 0.4, 1.6)
"""Pause before the first, second ... restart within the window of what has died by itself; the last one
holds for all that follow.
"""


class RestartBudget:
    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._recent: defaultdict[str, deque[tuple[float, bool]]] = defaultdict(deque)
        """When there was a restart, and whether the death was one from outside."""
        self.counts: defaultdict[str, int] = defaultdict(int)
        """Restarts since the launch, by unit."""

    def spend(
        self, unit: str, limit: int, now: float, *, from_outside: bool, was_ready: bool = True
    ) -> float | None:
        """Take one restart, and return the seconds to wait before `unit` is started again; None: there have
        been `limit` restarts in the window, or since it was ready. was_ready: whether it was ready when it
        died.
        """
        recent = self._recent[unit]
        forgets = was_ready or from_outside
        while forgets and recent and now - recent[0][0] >= self.window_s:
            recent.popleft()
        if len(recent) >= limit:
            return None
        recent.append((now, from_outside))
        self.counts[unit] += 1
        if from_outside:
            return 0.0
        num_by_itself = sum(not outside for _, outside in recent)
        return BACK_OFF_S[min(num_by_itself, len(BACK_OFF_S)) - 1]
