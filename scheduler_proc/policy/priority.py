"""PriorityPolicy: first come, first served within a priority; requests of a higher priority take rows and
pages from running ones of a lower priority.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler_proc.policy.base import WaitingView


class PriorityPolicy:
    """Keeps the order of the queue, and preempts. A preempted request continues later where it was."""

    preempts = True

    def order(self, waiting: WaitingView) -> Sequence[int]:
        return range(len(waiting))
