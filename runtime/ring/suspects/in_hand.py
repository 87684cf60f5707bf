"""InHand: shows the launcher which requests the tokenizer works on, and knows those under which tokenizers
have died.

A request is in hand while this process reads its text: in a turn of the work loop, or in a thread. One that
was there at two deaths is taken when nothing else is in hand. If the tokenizer dies then, it is refused from
then on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from runtime.ring.endpoints import Endpoints
from runtime.ring.suspects.errors import quarantined, suspended
from runtime.ring.suspects.roster import NO_SUSPECTS, Roster, Suspects, tenant_mark
from runtime.ring.tenants import OWNER
from runtime.wire.handle import sequence_key, sibling
from runtime.wire.messages import GenerateRequest

T = TypeVar("T")

NUM_PLACES = 512
"""Far more than a turn and the threads have in hand. Further requests would not be shown."""
WHO = "the tokenizer"


class InHand:
    def __init__(
        self,
        roster: Roster | None = None,
        suspects: Suspects = NO_SUSPECTS,
        *,
        has_tenants: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """roster: file that tells the launcher. has_tenants: as in QueueAdmission. clock: CLOCK_MONOTONIC."""
        self._roster = roster or Roster(bytearray())
        self._suspects = suspects
        self._has_tenants = has_tenants
        self._clock = clock
        self._of_turn: dict[bytes, None] = {}
        """Keys of the requests of this turn."""

    @staticmethod
    def open(endpoints: Endpoints, index: int, has_tenants: Callable[[], bool]) -> InHand:
        """Make the file of tokenizer number `index`, and read what is known of those before. Raises
        ConfigError if it cannot be made.
        """
        suspects = Suspects.read(endpoints.text_suspects_file)
        roster = Roster.create(endpoints.encoding_file(index), NUM_PLACES)
        return InHand(roster, suspects, has_tenants=has_tenants)

    def must_be_alone(self, request: GenerateRequest) -> bool:
        """Return True if a request may be taken only while nothing else is in hand."""
        return bool(self._suspects.alone) and _key(request) in self._suspects.alone

    def take(self, request: GenerateRequest) -> None:
        """Show a request until the end of the turn. Raises InvalidRequest if tokenizers have died of it, and
        RateLimited if they have of several of its tenant.
        """
        key = _key(request)
        self._of_turn[key] = None
        self._roster.add(key, request.tenant)
        if key in self._suspects.guilty:
            raise quarantined(WHO)
        if request.tenant != OWNER and self._suspects.suspended and self._has_tenants():
            left_s = self._suspects.suspended.get(tenant_mark(request.tenant), 0.0) - self._clock()
            if left_s > 0.0:
                raise suspended(WHO, left_s)

    def end_turn(self) -> None:
        for key in self._of_turn:
            self._put_down(key)
        self._of_turn.clear()

    def later(self, request: GenerateRequest, work: Callable[[], T]) -> Callable[[], T]:
        """Put a request down, and return `work` such that it is in hand again while a thread does it."""
        key = _key(request)
        if key in self._of_turn:
            del self._of_turn[key]
            self._roster.discard(key)

        def show_and_work() -> T:
            self._roster.add(key, request.tenant)
            try:
                return work()
            finally:
                self._put_down(key)

        return show_and_work

    def _put_down(self, key: bytes) -> None:
        """Put down a request whose text was read, so that no death before is laid to it any more."""
        if key in self._suspects.watched:
            self._roster.note_past(key)
        self._roster.note_served()
        self._roster.discard(key)


def _key(request: GenerateRequest) -> bytes:
    """Return a key for all sequences of a request, which have the same text. Each is submitted again by
    itself.
    """
    return sequence_key(sibling(request.handle, 0))
