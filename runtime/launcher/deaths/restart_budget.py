"""RestartBudget: decides whether a dead process is started again, and after how long. It only counts and
knows no process.

All deaths within the window count, so that nothing is restarted for ever. Of a process that does not become
ready any more all deaths count, however long it takes to fail. A pause only makes sense before the restart of
a process that died by itself, because the cause may have passed by then. A process that was killed from
outside is healthy, and callers wait for it.
"""

from __future__ import annotations

from collections import defaultdict, deque

BACK_OFF_S = (0.0, 0.1, 0.4, 1.6)
"""Seconds to wait before the first, second, ... restart within the window of a process that died by itself.
The last value holds for all further ones.
"""


class RestartBudget:
    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._recent: defaultdict[str, deque[tuple[float, bool]]] = defaultdict(deque)
        """Time of each recent restart, and True if the death came from outside."""
        self.counts: defaultdict[str, int] = defaultdict(int)
        """Number of restarts since the launch, by unit."""

    def spend(
        self, unit: str, limit: int, now: float, *, from_outside: bool, was_ready: bool = True
    ) -> float | None:
        """Use one restart, and return the seconds to wait before `unit` is started again. None: it has had
        `limit` restarts within the window, or since it was last ready. was_ready: True if it was ready when
        it died.
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
