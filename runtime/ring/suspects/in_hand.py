"""InHand: shows the launcher which requests a process works on at the moment, and knows those under which
processes of its role have died.

One that was there at two deaths is worked on while nothing else is in hand. If the process dies then, the
request is refused from then on.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from runtime.ring.endpoints import Endpoints
from runtime.ring.suspects.errors import quarantined, suspended
from runtime.ring.suspects.roster import (
    NO_SUSPECTS,
    OUTPUT,
    Roster,
    Suspects,
    piece_of,
    place_for,
    tenant_mark,
)
from runtime.ring.tenants import OWNER
from runtime.wire.handle import KEY_BYTES, REQUEST_BYTES, sequence_key
from runtime.wire.messages import GenerateRequest

T = TypeVar("T")

FIRST_INDEX = bytes(KEY_BYTES - REQUEST_BYTES)
NUM_PLACES = 512
"""Far more than what is in hand at a time. Further requests would not be shown."""
NAMES = {"tokenizer": "the tokenizer", "detokenizer": "the detokenizer", "grammar": "the grammar process"}
"""Names of the roles in errors."""


class InHand:
    """Requests in hand, by the handles of their sequences: these count as one, because they have the same
    text and guide, and each may be submitted again by itself. Threads may call all but `must_be_alone`.
    """

    def __init__(
        self, roster: Roster | None = None, suspects: Suspects = NO_SUSPECTS, *, role: str = "tokenizer"
    ) -> None:
        """roster: file that tells the launcher. None: nobody is told."""
        self._roster = roster or Roster(bytearray())
        self._suspects = suspects
        self._name = NAMES[role]
        self._alone = set(suspects.alone)
        self._lock = threading.Lock()
        self._counts: dict[bytes, int] = {}

    def must_be_alone(self, handle: bytes) -> bool:
        """Return True if a request may be worked on only while nothing else is in hand."""
        return bool(self._alone) and request_key(handle) in self._alone

    def check(self, handle: bytes) -> None:
        """Raise InvalidRequest if processes have died of a request."""
        if self._suspects.guilty and request_key(handle) in self._suspects.guilty:
            raise quarantined(self._name)

    def show(self, handle: bytes, tenant: str) -> None:
        key = request_key(handle)
        with self._lock:
            count = self._counts[key] = self._counts.get(key, 0) + 1
            if count == 1:
                self._roster.add(key, tenant)

    def put_down(self, handle: bytes) -> None:
        """Show a request no more. No death before is laid to it any longer."""
        key = request_key(handle)
        with self._lock:
            if self._release(key):
                self._note_past(key)
                self._roster.note_served()

    def _release(self, key: bytes) -> bool:
        """Count a request once less. Returns True if it is shown no more."""
        self._counts[key] -= 1
        if self._counts[key]:
            return False
        del self._counts[key]
        self._roster.discard(key)
        return True

    def _note_past(self, key: bytes) -> None:
        if key in self._suspects.watched:
            self._roster.note_past(key)
            self._alone.discard(key)


class TextsInHand(InHand):
    """Requests whose texts a tokenizer reads: in a turn of its loop, or in a thread."""

    def __init__(
        self,
        roster: Roster | None = None,
        suspects: Suspects = NO_SUSPECTS,
        *,
        has_tenants: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """has_tenants: as in QueueAdmission. clock: CLOCK_MONOTONIC."""
        super().__init__(roster, suspects)
        self._has_tenants = has_tenants
        self._clock = clock
        self._of_turn: Counter[bytes] = Counter()
        """Handles of the requests of this turn, and how often each was taken."""

    @staticmethod
    def open(endpoints: Endpoints, index: int, has_tenants: Callable[[], bool]) -> TextsInHand:
        """Make the file of tokenizer number `index`, and read what is known of those before. Raises
        ConfigError if it cannot be made.
        """
        return TextsInHand(*_opened(endpoints, "tokenizer", index), has_tenants=has_tenants)

    def take(self, request: GenerateRequest) -> None:
        """Show a request until the end of the turn, or until `finish` or `drop`. Raises InvalidRequest if
        tokenizers have died of it, and RateLimited if they have of several of its tenant.
        """
        self.check(request.handle)
        if request.tenant != OWNER and self._suspects.suspended and self._has_tenants():
            left_s = self._suspects.suspended.get(tenant_mark(request.tenant), 0.0) - self._clock()
            if left_s > 0.0:
                raise suspended(self._name, left_s)
        self._of_turn[request.handle] += 1
        self.show(request.handle, request.tenant)

    def finish(self, request: GenerateRequest) -> None:
        """Put a request down of which everything is read."""
        if self._is_of_turn(request):
            self.put_down(request.handle)

    def drop(self, request: GenerateRequest) -> None:
        """Put a request down of which nothing was read, so that it is not past a death."""
        if self._is_of_turn(request):
            with self._lock:
                self._release(request_key(request.handle))

    def _is_of_turn(self, request: GenerateRequest) -> bool:
        """Return True for a request that was taken in this turn, and count it once less."""
        if not self._of_turn[request.handle]:
            return False
        self._of_turn[request.handle] -= 1
        return True

    def end_turn(self) -> None:
        for handle in self._of_turn.elements():
            self.put_down(handle)
        self._of_turn.clear()

    def later(self, request: GenerateRequest, work: Callable[[], T]) -> Callable[[], T]:
        """Put a request down until a thread does `work`. Returns what the thread has to do."""
        self.drop(request)

        def show_and_work() -> T:
            self.show(request.handle, request.tenant)
            try:
                return work()
            finally:
                self.put_down(request.handle)

        return show_and_work


class SequencesInHand(InHand):
    """Sequences that the only thread of the grammar process works on, in one call of a library. Showing them
    costs little, because it is done for every token.

    Those of one request have the same guide and different outputs. So it is past a death when all of them are
    that were in hand, each in the kind of work that was done for it.
    """

    def __init__(self, roster: Roster | None = None, suspects: Suspects = NO_SUSPECTS) -> None:
        super().__init__(roster, suspects, role="grammar")
        self._shown: Sequence[bytes] = ()
        self._to_come = {key: set(pieces) for key, pieces in suspects.pieces.items()}
        """Pieces of each watched request that have yet to come past."""

    @staticmethod
    def open(endpoints: Endpoints) -> SequencesInHand:
        """Make the file of the grammar process, and read what is known of those before. Raises ConfigError if
        it cannot be made.
        """
        return SequencesInHand(*_opened(endpoints, "grammar", 0))

    def show_only(self, places: Sequence[bytes]) -> None:
        """Show nothing but these, which place_of has made."""
        self._roster.show_only(b"".join(places), len(self._shown))
        self._shown = places

    def put_all_down(self) -> None:
        """Show nothing. What was shown is done."""
        if self._to_come:
            for place in self._shown:
                self._come_past(piece_of(place))
        self._roster.note_served()
        self.show_only(())

    def _come_past(self, piece: bytes) -> None:
        request = request_key(piece)
        pieces = self._to_come.get(request)
        if pieces is None:
            return
        pieces.discard(piece)
        if not pieces:
            del self._to_come[request]
            self._note_past(request)


def place_of(handle: bytes, tenant: str, work: int = OUTPUT) -> bytes:
    """Return what SequencesInHand shows of a sequence."""
    return place_for(sequence_key(handle), tenant, work)


def at_work(place: bytes, work: int) -> bytes:
    """Return what SequencesInHand shows of a sequence while other work is done for it."""
    return place[:-1] + bytes([work])


def _opened(endpoints: Endpoints, role: str, index: int) -> tuple[Roster, Suspects]:
    suspects = Suspects.read(endpoints.suspects_file_of(role))
    return Roster.create(endpoints.in_hand_file(role, index), NUM_PLACES), suspects


def request_key(handle: bytes) -> bytes:
    """Return the key of all sequences of a request, in all attempts, from the handle or key of one."""
    return handle[:REQUEST_BYTES] + FIRST_INDEX
