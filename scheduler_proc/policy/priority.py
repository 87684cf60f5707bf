"""First come, first served, within a priority; a higher priority takes rows and pages from a lower one."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler_proc.policy.base import WaitingView


class PriorityPolicy:
    """The order in which the queue is kept anyway. What was running goes on later, where it was."""

    preempts = True

    def order(self, waiting: WaitingView) -> Sequence[int]:
        return range(len(waiting))
