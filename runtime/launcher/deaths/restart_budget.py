"""RestartBudget: decides whether a dead process is started again, and after how long. It only counts and
knows no process.

It is there for what cannot run: a broken machine, a model that fails. So deaths within the window count,
unless the culprit is known (Verdict): callers whose requests end the engine must not end the launch, too. But
an engine that serves nothing between its deaths is not started for ever, whoever is blamed. Of a process that
does not become ready any more all deaths count, however long it takes to fail.

A pause only makes sense before the restart of a process that died by itself, because the cause may have
passed by then. A process that was killed from outside is healthy, and callers wait for it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass

from runtime.base.errors import StartError

BACK_OFF_S = (0.0, 0.1, 0.4, 1.6, 5.0)
"""Seconds to wait before the first, second, ... restart within the window of a process that died by itself.
The last value holds for all further ones.
"""
IN_VAIN_FACTOR = 4
"""Deaths in a row between which nothing was served that end a launch, in multiples of the limit."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Judgement of a death and of the ones before it."""

    explained: Mapping[float, bool]
    """By time of death, of all that are judged now: True if the culprit is known."""
    has_served: bool
    """True if the process had served a request, or brought one past the point of an earlier death."""


@dataclass(slots=True)
class _Restart:
    at_s: float
    is_from_outside: bool
    is_explained: bool = False


class RestartBudget:
    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._recent: defaultdict[str, deque[_Restart]] = defaultdict(deque)
        self._num_in_vain: defaultdict[str, int] = defaultdict(int)
        """Number of judged deaths by unit since it last served something."""
        self.counts: defaultdict[str, int] = defaultdict(int)
        """Number of restarts since the launch, by unit."""

    def spend(
        self,
        unit: str,
        limit: int,
        now: float,
        *,
        from_outside: bool,
        was_ready: bool = True,
        verdict: Verdict | None = None,
    ) -> float:
        """Use one restart, and return the seconds to wait before `unit` is started again. now: time of the
        death. was_ready: True if the unit was ready when it died. Raises StartError if it has had `limit`
        unexplained restarts within the window, or since it was last ready, or has served nothing between too
        many deaths.
        """
        recent = self._recent[unit]
        forgets = was_ready or from_outside
        while forgets and recent and now - recent[0].at_s >= self.window_s:
            recent.popleft()
        recent.append(_Restart(now, from_outside))
        if verdict is not None:
            for each in recent:
                each.is_explained = verdict.explained.get(each.at_s, each.is_explained)
        if not limit or sum(not each.is_explained for each in recent) > limit:
            recent.pop()
            when = f"in {self.window_s:g} s before" if was_ready else "without getting ready"
            raise StartError(f"restarted {limit} times {when}")
        if verdict is not None:
            self._count_in_vain(unit, limit, has_served=verdict.has_served)
        self.counts[unit] += 1
        if from_outside:
            return 0.0
        num_by_itself = sum(not each.is_from_outside for each in recent)
        return BACK_OFF_S[min(num_by_itself, len(BACK_OFF_S)) - 1]

    def _count_in_vain(self, unit: str, limit: int, *, has_served: bool) -> None:
        if has_served:
            self._num_in_vain[unit] = 0
        if self._num_in_vain[unit] >= limit * IN_VAIN_FACTOR:
            times = self._num_in_vain[unit]
            raise StartError(f"restarted {times} times without serving one request to its end")
        self._num_in_vain[unit] += 1
