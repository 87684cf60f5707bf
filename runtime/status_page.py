"""StatusPage: one small file, mapped by every process of the ring, with a slot for each.

    slot:  counter (8) | copy 0 | copy 1        the copy that counts is counter mod 2

A slot is written by its owner's work loop only: into the other copy, then the counter moves on. All read, and
read again when the counter has moved meanwhile; so an owner that is held up or dies in the middle of a write
keeps nobody waiting and shows what it wrote last. Written by the loop itself, the heartbeat stops when the
loop does, which a thread's would not.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path
from typing import NamedTuple

# Native, so that it is written at once; with a byte order it would be byte by byte.
_COUNTER = struct.Struct("@Q")
_FIELDS = struct.Struct("<IIBxxxxxxxQIIQIIfQQ")
SLOT_BYTES = 256
ROLES = ("launcher", "scheduler", "worker", "tokenizer", "detokenizer", "api")
STATES = ("absent", "loading", "ready", "draining", "failed")


class Status(NamedTuple):
    """What one process says of itself. Only the scheduler fills what follows `heartbeat_ns`; of the
    detokenizer, `num_running` counts the sequences that have no terminal yet.
    """

    epoch: int = 0
    pid: int = 0
    state: str = "absent"
    heartbeat_ns: int = 0
    """CLOCK_MONOTONIC of the last turn of its work loop."""
    num_running: int = 0
    num_waiting: int = 0
    queued_prompt_tokens: int = 0
    num_free_pages: int = 0
    num_pages: int = 0
    tokens_per_s: float = 0.0
    max_len: int = 0
    """Longest sequence, prompt and output, that fits; 0 while unknown."""
    num_received: int = 0
    """Requests that have come to the scheduler since its start. It, `num_running` and `num_waiting` are of
    one moment, at most a step ago: what the tokenizer has sent beyond it is on the way.
    """

    def age_s(self) -> float:
        return (time.monotonic_ns() - self.heartbeat_ns) / 1e9


class StatusPage:
    def __init__(self, path: Path, *, create: bool = False) -> None:
        """Map the page; `create` makes it first. Raises OSError when it cannot be opened or made."""
        size = SLOT_BYTES * len(ROLES)
        fd = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
        try:
            if create:
                # Not a hole: where the disk is full, the first write to one would be a SIGBUS.
                os.posix_fallocate(fd, 0, size)
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)

    def write(self, role: str, status: Status) -> None:
        """Replace the slot of `role`. Call from its owner's work loop only."""
        at = ROLES.index(role) * SLOT_BYTES
        (count,) = _COUNTER.unpack_from(self._map, at)
        fields = status._replace(state=STATES.index(status.state))  # type: ignore[arg-type]
        _FIELDS.pack_into(self._map, _copy_at(at, count + 1), *fields)
        _COUNTER.pack_into(self._map, at, count + 1)

    def read(self, role: str) -> Status:
        """The slot of `role` as its owner wrote it last; Status() before it has."""
        at = ROLES.index(role) * SLOT_BYTES
        while True:
            (before,) = _COUNTER.unpack_from(self._map, at)
            fields = _FIELDS.unpack_from(self._map, _copy_at(at, before))
            (after,) = _COUNTER.unpack_from(self._map, at)
            if before == after:
                return Status(*fields)._replace(state=STATES[fields[2]])

    def close(self) -> None:
        self._map.close()


def _copy_at(slot_at: int, count: int) -> int:
    return slot_at + _COUNTER.size + count % 2 * _FIELDS.size
