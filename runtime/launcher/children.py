"""Children: the processes of a launch by their places, on all hosts, and the places that are empty."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from runtime.launcher.hosts.host import Child, Host, ProcessPlace

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
CHILD_EXIT_S = 0.3
"""Seconds that children have to end when they are asked to."""
LAST_WORDS_MS = 100
"""Milliseconds to wait for the message of a child that has ended with an error, which may arrive later than
the news of its end.
"""


class Children:
    def __init__(self, hosts: Mapping[int, Host]) -> None:
        """Start without processes. hosts: machines by node number."""
        self._hosts = hosts
        self._running: dict[ProcessPlace, Child] = {}
        self.due: dict[ProcessPlace, float] = {}
        """Empty places, and the monotonic time in seconds at which each is to be filled again."""

    def __iter__(self) -> Iterator[Child]:
        return iter(list(self._running.values()))

    @property
    def are_complete(self) -> bool:
        """True if no place is empty and every process is ready."""
        return not self.due and all(child.is_ready for child in self)

    def of_unit(self, unit: str) -> list[Child]:
        """Return the running processes that are restarted together under this name."""
        return [child for child in self if child.place.unit == unit]

    def get(self, place: ProcessPlace) -> Child | None:
        return self._running.get(place)

    def start(self, place: ProcessPlace, epoch: int) -> Child:
        """Start a process in a place. Raises StartError if that fails."""
        child = self._running[place] = self._hosts[place.node].start(place, epoch)
        return child

    def reap(self, child: Child) -> int:
        """Wait for a child that has ended or was killed. Returns its exit code, or minus the
        signal number.
        """
        # Removed first: a signal handler kills every child that is listed, and reaping closes its descriptor.
        del self._running[child.place]
        return child.reap()

    def exited(self, fired: Iterable[Any]) -> list[Child]:
        """Return the children whose ends are among the results of a poll."""
        sources = set(fired)
        return [child for child in self if child.is_among(sources)]

    def end(self, children: Iterable[Child], grace_s: float) -> None:
        """Ask children to end, kill those that have not within grace_s seconds, and wait for all."""
        ending = list(children)
        for child in ending:
            child.terminate()
        deadline = time.monotonic() + grace_s
        for child in ending:
            if not child.has_ended(max(0.0, deadline - time.monotonic())):
                child.kill()
            self.reap(child)
