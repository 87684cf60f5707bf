"""SolitaryRuns: sequences that run alone, one at a time, because the engine has died with them twice.

If it dies again, the one that runs is to blame and no other is: so while such a sequence lives nobody else is
admitted, and it is shown on the status page one turn before it starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.base.errors import InvalidRequest
from runtime.wire.handle import NO_HANDLE

if TYPE_CHECKING:
    from scheduler_proc.core.request import Request


def quarantined() -> InvalidRequest:
    """Return the error of a sequence under which the engine died while nothing else ran. Its status is 400,
    so that nobody tries again.
    """
    return InvalidRequest(
        "the engine has died several times with this request, the last time while it ran alone; it is not "
        "tried again",
        code="quarantined",
    )


class SolitaryRuns:
    """Sequences that are to run alone, in the order of arrival. True while there are any."""

    def __init__(self) -> None:
        self._requests: dict[bytes, Request] = {}
        self._next: Request | None = None
        """Whose turn it is, running or about to."""

    def __bool__(self) -> bool:
        return bool(self._requests)

    @property
    def shown(self) -> bytes:
        """Return the handle of the sequence whose turn it is; NO_HANDLE: nobody's."""
        return NO_HANDLE if self._next is None else self._next.handle

    def add(self, req: Request) -> None:
        self._requests[req.key] = req

    def discard(self, req: Request) -> None:
        if self._requests.pop(req.key, None) is req and self._next is req:
            self._next = None

    def next_to_start(self, num_running: int) -> Request | None:
        """Return who may be admitted now; None: something runs, or it is not shown yet that it is
        its turn.
        """
        if num_running:
            return None
        if self._next is None:
            self._next = next(iter(self._requests.values()))
            return None
        return self._next
