"""Roster: file of the engine's sequences that outlives the engine, and counts of the engine's deaths by
sequence.

The scheduler keeps the roster. When the engine has died of something that a request may have caused, the
launcher reads the roster, counts, and writes for the next engine which sequences must run alone and which
must not run at all. Clients are not asked about their past.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from runtime.base.errors import ConfigError
from runtime.ring.endpoints import Endpoints
from runtime.ring.launch_state import write_atomically
from runtime.wire.handle import KEY_BYTES, sequence_key

DEATHS_TO_RUN_ALONE = 2
"""Number of the engine's deaths with a sequence present after which that sequence must run alone."""
MAX_COUNTED = 65536
_EMPTY = bytes(KEY_BYTES)


class Roster:
    """File of sequence keys, in places of KEY_BYTES each. A free place holds zeros. When it is full, further
    keys are not recorded.
    """

    def __init__(self, places: bytearray | mmap.mmap) -> None:
        self._places = places
        self._free = list(range(len(places) // KEY_BYTES - 1, -1, -1))
        self._place_of: dict[bytes, int] = {}

    @staticmethod
    def create(path: Path, num_places: int) -> Roster:
        """Create the file and map it. Raises ConfigError if it cannot be created."""
        size = max(1, num_places) * KEY_BYTES
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            # Allocated, not a hole: on a full disk the first write to a hole would raise SIGBUS.
            os.posix_fallocate(fd, 0, size)
            return Roster(mmap.mmap(fd, size))
        except OSError as error:
            raise ConfigError(f"run_dir: {path}: {error.strerror}; it takes {size} bytes") from None
        finally:
            os.close(fd)

    def add(self, key: bytes) -> None:
        if self._free:
            place = self._place_of[key] = self._free.pop()
            self._places[place * KEY_BYTES : (place + 1) * KEY_BYTES] = key

    def discard(self, key: bytes) -> None:
        place = self._place_of.pop(key, None)
        if place is not None:
            self._places[place * KEY_BYTES : (place + 1) * KEY_BYTES] = _EMPTY
            self._free.append(place)

    def keys(self) -> set[bytes]:
        return keys_in(bytes(self._places))


def keys_in(places: bytes) -> set[bytes]:
    """Return the sequence keys in a roster's bytes."""
    keys = {places[at : at + KEY_BYTES] for at in range(0, len(places), KEY_BYTES)}
    keys.discard(_EMPTY)
    return keys


@dataclass(frozen=True, slots=True)
class Suspects:
    """Sequences under which the engine has died, by key."""

    alone: frozenset[bytes] = frozenset()
    """Keys of sequences that must run alone, because they were present at enough deaths."""
    guilty: frozenset[bytes] = frozenset()
    """Keys of sequences that ran alone when the engine died. They must not run again."""

    def encode(self) -> bytes:
        return b"".join(
            [b"\1" + key for key in sorted(self.guilty)] + [b"\0" + key for key in sorted(self.alone)]
        )

    @staticmethod
    def decode(data: bytes) -> Suspects:
        size = 1 + KEY_BYTES
        records = [data[at : at + size] for at in range(0, len(data), size)]
        return Suspects(
            frozenset(record[1:] for record in records if not record[0]),
            frozenset(record[1:] for record in records if record[0]),
        )

    @staticmethod
    def read(path: Path) -> Suspects:
        """Return the suspects that the launcher has written; none if there is no file."""
        try:
            return Suspects.decode(path.read_bytes())
        except FileNotFoundError:
            return NO_SUSPECTS


NO_SUSPECTS = Suspects()


class DeathCounts:
    """Number of the engine's deaths that a request may have caused, by sequence. The oldest are dropped
    first.
    """

    def __init__(self) -> None:
        self._counts: dict[bytes, int] = {}
        self._guilty: dict[bytes, None] = {}

    def count(self, present: set[bytes], solitary: bytes) -> Suspects:
        """Count a death. present: keys of the sequences that were there. solitary: handle of the one that ran
        alone, or NO_HANDLE. Returns the suspects.
        """
        for key in present:
            self._counts[key] = self._counts.pop(key, 0) + 1
        key = sequence_key(solitary)
        if key in present:
            self._guilty[key] = None
        for counted in (self._counts, self._guilty):
            while len(counted) > MAX_COUNTED:
                del counted[next(iter(counted))]
        alone = {key for key, deaths in self._counts.items() if deaths >= DEATHS_TO_RUN_ALONE}
        return Suspects(frozenset(alone - self._guilty.keys()), frozenset(self._guilty))


class EngineDeaths:
    """DeathCounts that are kept in the files of a run directory."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints
        self._counts = DeathCounts()

    def count(self, solitary: bytes) -> None:
        """Count a death of the engine, before the next one is started. Raises OSError."""
        try:
            present = keys_in(self._endpoints.roster_file.read_bytes())
        except FileNotFoundError:
            return  # it died before it could take anything in
        write_atomically(self._endpoints.suspects_file, self._counts.count(present, solitary).encode())
