"""SolitaryRuns: sequences that run alone, one at a time, because the engine died twice while they were
running.

If the engine dies again, the sequence that ran alone is to blame. So while such a sequence lives, no other is
admitted, and the status page names it one turn before it starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.base.errors import InvalidRequest
from runtime.wire.handle import NO_HANDLE

if TYPE_CHECKING:
    from scheduler_proc.core.request import Request


def quarantined() -> InvalidRequest:
    """Return the error for a sequence under which the engine died while nothing else ran. Its status is 400,
    so that clients do not retry.
    """
    return InvalidRequest(
        "the engine has died several times with this request, the last time while it ran alone; it is not "
        "tried again",
        code="quarantined",
    )


class SolitaryRuns:
    """Sequences that must run alone, in the order of arrival. True while there are any."""

    def __init__(self) -> None:
        self.requests: dict[bytes, Request] = {}
        """By sequence key."""
        self._next: Request | None = None
        """The sequence that runs alone now or next."""

    def __bool__(self) -> bool:
        return bool(self.requests)

    @property
    def shown(self) -> bytes:
        """Return the handle of the sequence that runs alone now or next; NO_HANDLE if there is none."""
        return NO_HANDLE if self._next is None else self._next.handle

    def add(self, req: Request) -> None:
        self.requests[req.key] = req

    def discard(self, req: Request) -> None:
        if self.requests.pop(req.key, None) is req and self._next is req:
            self._next = None

    def next_to_start(self, num_running: int) -> Request | None:
        """Return the request that may be admitted now. None if a request is running, or the next one is not
        on the status page yet.
        """
        if num_running:
            return None
        if self._next is None:
            self._next = next(iter(self.requests.values()))
            return None
        return self._next
