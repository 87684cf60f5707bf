"""StatusPage: one small file, mapped by every process of the ring, with a slot for each.

A slot is written by its owner's work loop only and read by all, under a sequence lock: the owner makes the
counter odd, writes, makes it even; a reader that saw an odd or a changed counter reads again. Written by the
loop itself, the heartbeat stops when the loop does, which a thread's would not.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path
from typing import NamedTuple

_COUNTER = struct.Struct("<Q")
_FIELDS = struct.Struct("<IIBxxxxxxxQIIQIIfQQ")
SLOT_BYTES = 128
ROLES = ("launcher", "scheduler", "worker", "tokenizer", "detokenizer", "api")
STATES = ("absent", "loading", "ready", "draining", "failed")
MAX_READ_TRIES = 1000


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
    """Requests that have come to the scheduler since its start. It, `num_running` and `num_waiting` are of one
    moment, at most a step ago: what a tokenizer has sent beyond it is on the way.
    """

    def age_s(self) -> float:
        return (time.monotonic_ns() - self.heartbeat_ns) / 1e9


class StatusPage:
    def __init__(self, path: Path, *, create: bool = False) -> None:
        """Map the page; `create` makes it first. Raises OSError when it cannot be opened."""
        size = SLOT_BYTES * len(ROLES)
        fd = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
        try:
            if create:
                os.ftruncate(fd, size)
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)

    def write(self, role: str, status: Status) -> None:
        """Replace the slot of `role`. Call from its owner's work loop only."""
        at = ROLES.index(role) * SLOT_BYTES
        (count,) = _COUNTER.unpack_from(self._map, at)
        count |= 1
        _COUNTER.pack_into(self._map, at, count)
        fields = status._replace(state=STATES.index(status.state))  # type: ignore[arg-type]
        _FIELDS.pack_into(self._map, at + _COUNTER.size, *fields)
        _COUNTER.pack_into(self._map, at, count + 1)

    def read(self, role: str) -> Status:
        """The slot of `role`; Status() when its owner died in the middle of a write."""
        at = ROLES.index(role) * SLOT_BYTES
        for _ in range(MAX_READ_TRIES):
            (before,) = _COUNTER.unpack_from(self._map, at)
            fields = _FIELDS.unpack_from(self._map, at + _COUNTER.size)
            (after,) = _COUNTER.unpack_from(self._map, at)
            if before == after and before % 2 == 0:
                status = Status(*fields)
                return status._replace(state=STATES[fields[2]])
        return Status()

    def close(self) -> None:
        self._map.close()
