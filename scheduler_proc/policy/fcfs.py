"""First come, first served, within a priority."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler_proc.policy.base import WaitingView


class Fcfs:
    """The order in which the queue is kept anyway."""

    def order(self, waiting: WaitingView) -> Sequence[int]:
        return range(len(waiting))
