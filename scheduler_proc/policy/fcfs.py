"""First come, first served, within a priority."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler_proc.policy.base import WaitingView


class Fcfs:
    """First come, first served: keeps the order of the queue."""

    def order(self, waiting: WaitingView) -> Sequence[int]:
        return range(len(waiting))
