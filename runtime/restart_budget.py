"""RestartBudget: whether what has died is started again, and how soon. Pure counting; knows no process."""

from __future__ import annotations

from collections import defaultdict, deque

BACK_OFF_S = (0.0, 0.1, 0.4, 1.6)
"""Pause before the first, second ... restart within the window; the last one holds for all that follow."""


class RestartBudget:
    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._recent: defaultdict[str, deque[float]] = defaultdict(deque)
        self.counts: defaultdict[str, int] = defaultdict(int)
        """Restarts since the launch, by unit."""

    def spend(self, unit: str, limit: int, now: float) -> float | None:
        """Seconds to wait before `unit` is started again; None: the window has had `limit` restarts."""
        recent = self._recent[unit]
        while recent and now - recent[0] >= self.window_s:
            recent.popleft()
        if len(recent) >= limit:
            return None
        recent.append(now)
        self.counts[unit] += 1
        return BACK_OFF_S[min(len(recent), len(BACK_OFF_S)) - 1]
