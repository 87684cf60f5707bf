"""SolitaryRuns and Suspicions: sequences under which the engine died before.

Each of them is suspected until it has come further than where the engine died: it has computed everything
that it had then, and has a new token. One that was there at two deaths runs alone until then. If the engine
dies meanwhile, it is to blame. So no other is admitted, and the status page names it one turn before it
starts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from runtime.wire.handle import NO_HANDLE

if TYPE_CHECKING:
    from scheduler_proc.core.request import Request


RETURN_S = 1.0
"""Seconds that a new engine waits for those under which the one before has died, before others may run."""
MAX_HOLD_S = 10.0
"""Seconds after which others may run although some have not come past the point of the death."""


class Suspicions:
    """Live sequences that have not yet come past the point where an engine died under them. True while there
    are any.

    In a new engine they go first: if one that has just come ended it again at once, they could never come
    past that point, and it could not be told who ends the engine.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.reached: dict[bytes, tuple[Request, int]] = {}
        """Each of them, and its number of tokens at the death, by its name as a suspect."""
        self._missing: set[bytes] = set()
        self._began_s = math.inf

    def __bool__(self) -> bool:
        return bool(self.reached)

    def expect(self, suspects: Iterable[bytes]) -> None:
        """Wait for these sequences, which the engine before had."""
        self._missing.update(suspects)

    def add(self, req: Request, reached: int) -> None:
        """Suspect a sequence until it has more than `reached` tokens."""
        self.reached[req.suspect] = (req, reached)
        self._missing.discard(req.suspect)

    def discard(self, req: Request) -> bool:
        """Stop suspecting a sequence. Returns True if it was suspected."""
        return self.reached.pop(req.suspect, None) is not None

    def past(self) -> list[Request]:
        """Return those that run and have come past the point."""
        return [req for req, reached in self.reached.values() if is_past(req, reached)]

    def going_first(self) -> list[Request] | None:
        """Return the only requests that may start now, or None if all may."""
        if not self._missing and not self.reached:
            return None
        now = self._clock()
        self._began_s = min(self._began_s, now)
        if now - self._began_s >= RETURN_S:
            self._missing.clear()
        if now - self._began_s >= MAX_HOLD_S or not (self._missing or self.reached):
            return None
        return [req for req, _ in self.reached.values()]


def is_past(req: Request, reached: int) -> bool:
    """Return True if a request has more than `reached` tokens, the last of which was computed in this
    stay.
    """
    if req.row < 0:
        return False
    num_tokens_of = req.rows.num_tokens_of
    num_tokens = max(num_tokens_of[row] for row in req.held_rows)
    return num_tokens > max(reached, req.num_given)


class SolitaryRuns:
    """Sequences that must run alone, those with the least output first. True while there are any."""

    def __init__(self) -> None:
        self.requests: dict[bytes, Request] = {}
        """By sequence key."""
        self.is_settled = True
        """False while a step is in flight. Whoever was in it could still end the engine."""
        self._until: dict[bytes, int] = {}
        self._next: Request | None = None
        """The sequence that runs alone now or next."""

    def __bool__(self) -> bool:
        return bool(self.requests)

    @property
    def shown(self) -> bytes:
        """Return the handle of the sequence that runs alone now or next; NO_HANDLE if there is none."""
        return NO_HANDLE if self._next is None else self._next.handle

    def add(self, req: Request, until: int) -> None:
        """Have a sequence run alone until it has more than `until` tokens."""
        self.requests[req.key] = req
        self._until[req.key] = until

    def discard(self, req: Request) -> None:
        if self.requests.pop(req.key, None) is None:
            return
        del self._until[req.key]
        if self._next is req:
            self._next = None

    def next_to_start(self, num_running: int) -> Request | None:
        """Return the request that may be admitted now. None if a request is running or was in a step that is
        in flight, or the next one is not on the status page yet.
        """
        if num_running or not self.is_settled:
            return None
        if self._next is None:
            # What ends the engine has often done so with its first tokens.
            self._next = min(self.requests.values(), key=lambda req: req.num_output)
            return None
        return self._next

    def cleared(self) -> Request | None:
        """Return the request that has run alone for long enough, or None."""
        req = self._next
        return req if req is not None and is_past(req, self._until[req.key]) else None
