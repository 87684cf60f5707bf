"""InHand: shows the launcher which requests a process works on at the moment, and knows those under which
processes of its role have died.

One that was there at two deaths is worked on while nothing else is in hand. If the process dies then, the
request is refused from then on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from runtime.ring.endpoints import Endpoints
from runtime.ring.suspects.content import content_of_request
from runtime.ring.suspects.errors import quarantined, suspended
from runtime.ring.suspects.roster import (
    NO_SUSPECTS,
    OUTPUT,
    SUSPECT_BYTES,
    Roster,
    Suspects,
    piece_of,
    place_for,
    suspect_of,
    tenant_mark,
)
from runtime.ring.tenants import OWNER
from runtime.wire.format import NO_CONTENT
from runtime.wire.handle import KEY_BYTES, REQUEST_BYTES
from runtime.wire.messages import GenerateRequest

T = TypeVar("T")

FIRST_INDEX = bytes(KEY_BYTES - REQUEST_BYTES)
NUM_PLACES = 512
"""Far more than what is in hand at a time. Further requests would not be shown."""
NAMES = {"tokenizer": "the tokenizer", "detokenizer": "the detokenizer", "grammar": "the grammar process"}
"""Names of the roles in errors."""


class InHand:
    """Requests in hand, as `suspect_in_hand` names them. Threads may call all but `must_be_alone`."""

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

    @property
    def has_alone(self) -> bool:
        """True if there are requests that must be worked on alone."""
        return bool(self._alone)

    def must_be_alone(self, suspect: bytes) -> bool:
        """Return True if a request may be worked on only while nothing else is in hand."""
        return suspect in self._alone

    def check(self, suspect: bytes) -> None:
        """Raise InvalidRequest if processes have died of a request."""
        if suspect in self._suspects.guilty:
            raise quarantined(self._name)

    def show(self, suspect: bytes, tenant: str) -> None:
        with self._lock:
            count = self._counts[suspect] = self._counts.get(suspect, 0) + 1
            if count == 1:
                self._roster.add(suspect, tenant)

    def put_down(self, *suspects: bytes) -> None:
        """Show requests no more. No death before is laid to them any longer."""
        with self._lock:
            for suspect in suspects:
                if self._release(suspect):
                    self._note_past(suspect)
                    self._roster.note_served()

    def _release(self, suspect: bytes) -> bool:
        """Count a request once less. Returns True if it is shown no more."""
        self._counts[suspect] -= 1
        if self._counts[suspect]:
            return False
        del self._counts[suspect]
        self._roster.discard(suspect)
        return True

    def _note_past(self, suspect: bytes) -> None:
        if suspect in self._suspects.watched:
            self._roster.note_past(suspect)
            self._alone.discard(suspect)


class TextsInHand(InHand):
    """Requests whose texts a tokenizer reads: in a turn of its loop, or in a thread."""

    def __init__(
        self,
        roster: Roster | None = None,
        suspects: Suspects = NO_SUSPECTS,
        *,
        has_tenants: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        secret: bytes = b"",
    ) -> None:
        """has_tenants: as in QueueAdmission. clock: CLOCK_MONOTONIC. secret: key of the launch."""
        super().__init__(roster, suspects)
        self._secret = secret
        self._has_tenants = has_tenants
        self._clock = clock
        self._of_turn: list[bytes] = []
        """The requests of this turn, each as often as it was taken."""

    @staticmethod
    def open(endpoints: Endpoints, index: int, has_tenants: Callable[[], bool], secret: bytes) -> TextsInHand:
        """Make the file of tokenizer number `index`, and read what is known of those before. Raises
        ConfigError if it cannot be made.
        """
        return TextsInHand(*_opened(endpoints, "tokenizer", index), has_tenants=has_tenants, secret=secret)

    def is_for_alone(self, request: GenerateRequest) -> bool:
        """Return True if a request may be taken only while nothing else is in hand."""
        return self.has_alone and self.must_be_alone(self._suspect_of(request))

    def _suspect_of(self, request: GenerateRequest) -> bytes:
        return suspect_in_hand(request.handle, content_of_request(request, self._secret))

    def take(self, request: GenerateRequest) -> bytes:
        """Show a request until the end of the turn, or until `finish` or `drop`. Returns its name there.
        Raises InvalidRequest if tokenizers have died of it, and RateLimited if they have of several of its
        tenant.
        """
        suspect = self._suspect_of(request)
        self.check(suspect)
        if request.tenant != OWNER and self._suspects.suspended and self._has_tenants():
            left_s = self._suspects.suspended.get(tenant_mark(request.tenant), 0.0) - self._clock()
            if left_s > 0.0:
                raise suspended(self._name, left_s)
        self._of_turn.append(suspect)
        self.show(suspect, request.tenant)
        return suspect

    def finish(self, suspect: bytes) -> None:
        """Put a request down whose text or ids have been read in this turn."""
        if self._remove_from_turn(suspect):
            self.put_down(suspect)

    def drop(self, suspect: bytes) -> None:
        """Put a request down of which nothing was read. It has come past no death by that."""
        if self._remove_from_turn(suspect):
            with self._lock:
                self._release(suspect)

    def _remove_from_turn(self, suspect: bytes) -> bool:
        """Count a request of this turn once less. Returns False if it is not, or no longer, of this turn."""
        if suspect not in self._of_turn:
            return False
        self._of_turn.remove(suspect)
        return True

    def end_turn(self) -> None:
        self.put_down(*self._of_turn)
        self._of_turn.clear()

    def later(self, suspect: bytes, tenant: str, work: Callable[[], T]) -> Callable[[], T]:
        """Put a request down until a thread does `work`. Returns what the thread has to do."""
        self.drop(suspect)

        def show_and_work() -> T:
            self.show(suspect, tenant)
            try:
                return work()
            finally:
                self.put_down(suspect)

        return show_and_work


class SequencesInHand(InHand):
    """Sequences that the only thread of the grammar process works on, in one call of a library. Showing them
    costs little, because it is done for every token.

    Those of one request have the same guide and different outputs. So the request is past a death when each
    sequence that was in hand then is past it, in the same kind of work.
    """

    def __init__(
        self, roster: Roster | None = None, suspects: Suspects = NO_SUSPECTS, *, role: str = "grammar"
    ) -> None:
        super().__init__(roster, suspects, role=role)
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
        request = request_of(piece)
        pieces = self._to_come.get(request)
        if pieces is None:
            return
        pieces.discard(piece)
        if not pieces:
            del self._to_come[request]
            self._note_past(request)


class StreamsInHand(SequencesInHand):
    """The stream that the only thread of a detokenizer works on. Showing has a cost for every token, so
    nothing is shown until a detokenizer of the launch has died of what may have been a request.
    """

    def __init__(
        self, roster: Roster | None = None, suspects: Suspects = NO_SUSPECTS, *, is_shown: bool = False
    ) -> None:
        super().__init__(roster, suspects, role="detokenizer")
        self.is_shown = is_shown

    @staticmethod
    def open_of(endpoints: Endpoints, index: int) -> StreamsInHand:
        """Make the file of detokenizer number `index`, and read what is known of those before. Raises
        ConfigError if it cannot be made.
        """
        is_shown = endpoints.suspects_file_of("detokenizer").exists()
        return StreamsInHand(*_opened(endpoints, "detokenizer", index), is_shown=is_shown)

    def take(self, handle: bytes, content: bytes) -> bytes:
        """Show a new stream. Returns its place. Raises InvalidRequest if detokenizers have died of it."""
        if not self.is_shown:
            return b""
        self.check(suspect_in_hand(handle, content))
        place = place_of(handle, content, OWNER)
        self.show_only((place,))
        return place

    def work_on(self, place: bytes) -> None:
        """Show this stream from now on, instead of the one before."""
        if place:
            self.show_only((place,))

    def rest(self) -> None:
        """Show nothing."""
        if self.is_shown:
            self.show_only(())

    def finish(self, place: bytes) -> None:
        """Clear a stream that has come to its end."""
        if place:
            self.show_only((place,))
            self.put_all_down()


def place_of(handle: bytes, content: bytes, tenant: str, work: int = OUTPUT) -> bytes:
    """Return what SequencesInHand shows of a sequence."""
    return place_for(suspect_of(handle, content), tenant, work)


def at_work(place: bytes, work: int) -> bytes:
    """Return what SequencesInHand shows of a sequence while other work is done for it."""
    return place[:-1] + bytes([work])


def _opened(endpoints: Endpoints, role: str, index: int) -> tuple[Roster, Suspects]:
    suspects = Suspects.read(endpoints.suspects_file_of(role))
    return Roster.create(endpoints.in_hand_file(role, index), NUM_PLACES), suspects


def suspect_in_hand(handle: bytes, content: bytes = NO_CONTENT) -> bytes:
    """Return the name of a request in hand. All of its sequences count as one, because they have the same
    text and guide, and each may be submitted again by itself.
    """
    return handle[:REQUEST_BYTES] + FIRST_INDEX + content


def request_of(suspect: bytes) -> bytes:
    """Return the name in hand of a sequence's request. suspect: the sequence's name, or a piece of it."""
    return suspect[:REQUEST_BYTES] + FIRST_INDEX + suspect[KEY_BYTES:SUSPECT_BYTES]
