"""Roster: file of the engine's sequences that outlives the engine; and Suspects, which the launcher makes of
it for the next one.

    header | live sequences, with their tenants | rows as the newest step has them | who is past

A suspect is known by its key and a digest of what it asks for: a caller who sends something harmless under
the same key must not clear it.

The scheduler keeps the roster. When the engine has died of something that a request may have caused, the
launcher reads it (runtime/launcher/deaths/engine_deaths.py). Clients are not asked about their past.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import msgspec

from runtime.base.errors import ConfigError
from runtime.ring.tenants import OWNER
from runtime.wire.format import CONTENT_BYTES, NO_CONTENT
from runtime.wire.handle import HANDLE_BYTES, KEY_BYTES, sequence_key

SUSPECT_BYTES = KEY_BYTES + CONTENT_BYTES
MARK_BYTES = 8
PLACE_BYTES = SUSPECT_BYTES + MARK_BYTES + 1
"""Bytes of a place: the suspect, the tenant's mark, and one that is LEFT for a sequence that has ended early,
or the kind of work that a process does for one that is in hand.
"""
LEFT = 1
OUTPUT, GUESSES, HYPOTHESES = 0, 2, 3
"""Kinds of work: following an output, guesses behind it, hypotheses of a search."""
OWNER_MARK = bytes(MARK_BYTES)
ALWAYS_ALONE = (1 << 31) - 1
"""Position that no sequence passes, so that one stays alone until its end."""
_HEADER = struct.Struct("<II?")
_SERVED_AT = 8
_EMPTY = bytes(SUSPECT_BYTES)


def suspect_of(handle: bytes, content: bytes = NO_CONTENT) -> bytes:
    """Return the SUSPECT_BYTES that name a sequence in all attempts, if its content is the same. handle: its
    handle or key.
    """
    return handle[:KEY_BYTES] + content


def content_in(suspect: bytes) -> bytes:
    """Return the digest of what a suspect asks for."""
    return suspect[KEY_BYTES:]


@lru_cache(maxsize=4096)
def tenant_mark(tenant: str) -> bytes:
    """Return the few bytes by which a tenant is known in the files of a launch; OWNER_MARK for the owner."""
    if tenant == OWNER:
        return OWNER_MARK
    return hashlib.blake2b(tenant.encode(), digest_size=MARK_BYTES).digest()


def place_for(suspect: bytes, tenant: str, work: int = OUTPUT) -> bytes:
    """Return the content of the place of a live sequence."""
    return suspect + tenant_mark(tenant) + bytes([work])


def piece_of(place: bytes) -> bytes:
    """Return the name and the kind of work in a place, which together have to come past a death."""
    return place[:SUSPECT_BYTES] + place[-1:]


@dataclass(frozen=True, slots=True)
class RowViews:
    """Memory of the row columns that the roster repeats, all rows one after the other."""

    handles: memoryview
    reached: memoryview
    """Number of tokens of each row that launched steps have computed or compute, in four bytes."""
    stays: memoryview
    """Number of the stay of each row, in eight bytes; 0: the row is free."""


class Roster:
    """File of sequences, as `suspect_of` names them, in places. A free place holds zeros. When it is full,
    further ones are not recorded.
    """

    def __init__(self, memory: bytearray | mmap.mmap, num_places: int = 0, num_rows: int = 0) -> None:
        """Write an empty roster to `memory`, which has size_of(num_places, num_rows) bytes."""
        self._memory = memory
        self._free = list(range(num_places - 1, -1, -1))
        self._place_of: dict[bytes, int] = {}
        self._layout = _Layout(num_places, num_rows)
        self._num_past = 0
        self._has_served = False
        self._copies: tuple[tuple[slice, memoryview], ...] = ()
        self._num_launched = self._num_ended = 0
        """Number of steps."""
        self._left: deque[tuple[int, int]] = deque()
        """Places of those that have ended early, each with the number of the last step that may have it."""
        if num_places:
            memory[: _HEADER.size] = _HEADER.pack(num_places, num_rows, False)

    @staticmethod
    def create(path: Path, num_places: int, num_rows: int = 0) -> Roster:
        """Create the file and map it. Raises ConfigError if it cannot be created."""
        num_places = max(1, num_places)
        size = size_of(num_places, num_rows)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            # Allocated, not a hole: on a full disk the first write to a hole would raise SIGBUS.
            os.posix_fallocate(fd, 0, size)
            return Roster(mmap.mmap(fd, size), num_places, num_rows)
        except OSError as error:
            raise ConfigError(f"run_dir: {path}: {error.strerror}; it takes {size} bytes") from None
        finally:
            os.close(fd)

    def add(self, suspect: bytes, tenant: str = OWNER) -> None:
        if self._free:
            place = self._place_of[suspect] = self._free.pop()
            at = _HEADER.size + place * PLACE_BYTES
            self._memory[at : at + PLACE_BYTES] = place_for(suspect, tenant)

    def show_only(self, places: bytes, num_before: int) -> None:
        """Write places, made by `place_for`, over the first num_before ones. For a roster that keeps nothing
        else.
        """
        num_bytes = max(len(places), num_before * PLACE_BYTES)
        if num_bytes <= self._layout.num_places * PLACE_BYTES:
            self._memory[_HEADER.size : _HEADER.size + num_bytes] = places.ljust(num_bytes, b"\0")

    def discard(self, suspect: bytes) -> None:
        place = self._place_of.pop(suspect, None)
        if place is not None:
            self._clear(place)

    def leave(self, suspect: bytes) -> None:
        """Record that a sequence with a row has ended early. It is forgotten when the steps in flight, which
        may end the engine because of it, have ended.
        """
        if self._num_launched == self._num_ended:
            self.discard(suspect)
            return
        place = self._place_of.pop(suspect, None)
        if place is not None:
            self._memory[_HEADER.size + (place + 1) * PLACE_BYTES - 1] = LEFT
            self._left.append((self._num_launched, place))

    def _clear(self, place: int) -> None:
        at = _HEADER.size + place * PLACE_BYTES
        self._memory[at : at + SUSPECT_BYTES] = _EMPTY
        self._free.append(place)

    def watch(self, rows: RowViews) -> None:
        """Repeat these rows from now on, if the file has places for them."""
        layout = self._layout
        if layout.num_rows and len(rows.handles) == layout.num_rows * HANDLE_BYTES:
            self._copies = (
                (slice(layout.handles, layout.reached), rows.handles),
                (slice(layout.reached, layout.stays), rows.reached),
                (slice(layout.stays, layout.past), rows.stays),
            )

    def note_step(self) -> None:
        """Repeat who holds a row, and how far each has come with the step that is launched now."""
        self._num_launched += 1
        memory = self._memory
        for part, column in self._copies:
            memory[part] = column

    def note_step_end(self, num_steps: int = 1) -> None:
        """Record that the oldest steps in flight have ended."""
        self._num_ended += num_steps
        while self._left and self._left[0][0] <= self._num_ended:
            self._clear(self._left.popleft()[1])

    def note_past(self, suspect: bytes) -> None:
        """Record that a sequence has come further than where an engine died under it."""
        at = self._layout.past + self._num_past * SUSPECT_BYTES
        if self._num_past < self._layout.num_places:
            self._memory[at : at + SUSPECT_BYTES] = suspect
            self._num_past += 1

    def note_served(self) -> None:
        """Record that a sequence that had a row has come to its end."""
        if not self._has_served and self._layout.num_places:
            self._has_served = True
            self._memory[_SERVED_AT] = 1

    def read(self) -> Seen:
        return Seen.decode(bytes(self._memory))

    def suspects(self) -> set[bytes]:
        """Return the names of all live sequences."""
        return set(self.read().present)


class _Layout:
    """Places of the parts of a roster in its file."""

    __slots__ = ("end", "handles", "num_places", "num_rows", "past", "reached", "stays")

    def __init__(self, num_places: int, num_rows: int) -> None:
        self.num_places = num_places
        self.num_rows = num_rows
        self.handles = _HEADER.size + num_places * PLACE_BYTES
        self.reached = self.handles + num_rows * HANDLE_BYTES
        self.stays = self.reached + num_rows * 4
        self.past = self.stays + num_rows * 8
        self.end = self.past + num_places * SUSPECT_BYTES


def size_of(num_places: int, num_rows: int) -> int:
    return _Layout(num_places, num_rows).end


@dataclass(frozen=True, slots=True)
class Seen:
    """Content of the roster of a dead engine. Sequences are named as `suspect_of` does."""

    present: Mapping[bytes, bytes] = field(default_factory=dict)
    """Mark of the tenant of each sequence that was live."""
    left: Mapping[bytes, bytes] = field(default_factory=dict)
    """The same of each that had ended early while steps that may have had it were in flight."""
    running: Mapping[bytes, int] = field(default_factory=dict)
    """Number of tokens up to which steps had computed each of those that held a row."""
    past: frozenset[bytes] = frozenset()
    """Suspects that came further than where engines had died under them before."""
    has_served: bool = False
    """True if a sequence that had a row came to its end."""
    pieces: frozenset[bytes] = field(default=frozenset(), compare=False)
    """The keys of those that were live, each with the kind of its work, as piece_of returns it."""

    @staticmethod
    def read(path: Path) -> Seen:
        """Return the content of a file; nothing if there is none."""
        try:
            return Seen.decode(path.read_bytes())
        except FileNotFoundError:
            return Seen()

    @staticmethod
    def decode(data: bytes) -> Seen:
        if len(data) < _HEADER.size:
            return Seen()
        num_places, num_rows, has_served = _HEADER.unpack_from(data)
        layout = _Layout(num_places, num_rows)
        present: dict[bytes, bytes] = {}
        left: dict[bytes, bytes] = {}
        pieces: set[bytes] = set()
        for at in range(_HEADER.size, layout.handles, PLACE_BYTES):
            place = data[at : at + PLACE_BYTES]
            if (suspect := place[:SUSPECT_BYTES]) != _EMPTY:
                (left if place[-1] == LEFT else present)[suspect] = place[SUSPECT_BYTES:-1]
                if place[-1] != LEFT:
                    pieces.add(piece_of(place))
        live = {sequence_key(each): each for each in present}
        running: dict[bytes, int] = {}
        for row in range(layout.num_rows):
            at = layout.handles + row * HANDLE_BYTES
            found = live.get(sequence_key(data[at : at + HANDLE_BYTES]))
            if found is not None and any(data[layout.stays + 8 * row : layout.stays + 8 * row + 8]):
                at = layout.reached + 4 * row
                reached = int.from_bytes(data[at : at + 4], "little")
                running[found] = max(reached, running.get(found, 0))
        past = {data[at : at + SUSPECT_BYTES] for at in range(layout.past, layout.end, SUSPECT_BYTES)}
        past -= {_EMPTY}
        return Seen(present, left, running, frozenset(past), has_served, frozenset(pieces))


class Suspects(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sequences under which the engine has died, named as `suspect_of` does, and tenants whose sequences did
    it.
    """

    alone: dict[bytes, int] = {}
    """Sequences that must run alone, because they were present at enough deaths, until they have more tokens
    than this.
    """
    watched: dict[bytes, int] = {}
    """Sequences that were present at a death, and the number of tokens that shows them to be past it."""
    guilty: frozenset[bytes] = frozenset()
    """Sequences that ran alone when the engine died. They must not run again."""
    suspended: dict[bytes, float] = {}
    """Marks of tenants, of which none runs until this time of CLOCK_MONOTONIC."""
    pieces: dict[bytes, tuple[bytes, ...]] = {}
    """Pieces, as piece_of returns them, that were in hand of each watched request at its deaths: it is past
    them when all of these are. Empty for the engine.
    """

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def decode(data: bytes) -> Suspects:
        return msgspec.msgpack.decode(data, type=Suspects)

    @staticmethod
    def read(path: Path) -> Suspects:
        """Return the suspects that the launcher has written; none if there is no file."""
        try:
            return Suspects.decode(path.read_bytes())
        except FileNotFoundError:
            return NO_SUSPECTS


NO_SUSPECTS = Suspects()
