"""StatusPage: one small file, mapped by every process of the ring, with a slot for each.

    header: magic (4) | version (2) | processes of each role (2 each)
    slot:   counter (8) | copy 0 | copy 1        the copy that counts is counter mod 2

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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from runtime.wire.handle import NO_HANDLE

# Native, so that it is written at once; with a byte order it would be byte by byte.
_COUNTER = struct.Struct("@Q")
_FIELDS = struct.Struct("<IIBxxxxxxxQIIQIIfQQQIQQIQ16s?xxxf??")
MAGIC = b"CRSP"
VERSION = 12
HEADER_BYTES = 256
SLOT_BYTES = 512
ROLES = ("launcher", "scheduler", "worker", "tokenizer", "detokenizer", "api", "grammar")
_HEADER = struct.Struct(f"<4sH{len(ROLES)}H")
STATES = ("absent", "loading", "ready", "draining", "failed", "restarting")


class ProcessStatus(NamedTuple):
    """Words of one process about itself. Only the scheduler fills what follows `heartbeat_ns`, but for
    `num_running`, of a tokenizer the sequences whose prompts it is still encoding, of a detokenizer its
    sequences that have no terminal yet, of an API server its callers that wait for an answer, `num_received`,
    `num_sent`, `num_clients` and `recovery_ns`.
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
    """Requests that have come to the scheduler since its start; messages that have come to a tokenizer or a
    detokenizer. The scheduler's, `num_running` and `num_waiting` are of
    one moment, at most a step ago: what the tokenizers have sent beyond it is on the way.
    """
    num_sent: int = 0
    """Sequences that this tokenizer has let through since its start; messages of a detokenizer to clients."""
    batch_size: int = 0
    """Sequences in the scheduler's newest step; 0 when it had nothing to compute."""
    num_launched: int = 0
    """Steps that the scheduler has sent to the worker since its start."""
    num_finished: int = 0
    """Steps whose results the scheduler has: a difference that stays says that the worker is stuck."""
    num_clients: int = 0
    """For a detokenizer: clients that are connected, processes of the HTTP server among them."""
    recovery_ns: int = 0
    """The time, by CLOCK_MONOTONIC, after which requests are made again: the launcher's, when a process that
    is being replaced was not ready yet, last; a detokenizer's, when a client came back under the id it had.
    """
    solitary: bytes = NO_HANDLE
    """The sequence that the scheduler runs alone because the engine died under it before, or NO_HANDLE."""

    is_paused: bool = False
    """For the scheduler: it launches no step until generation is to go on."""
    loaded: float = 0.0
    """For a worker, and a scheduler that has it in its process: share of the weights that is there."""
    is_profiling: bool = False
    """For the scheduler: a profile is being taken."""
    is_in_call: bool = False
    """For the scheduler: a call to the ranks is not answered yet, and no step is launched until it is."""

    def age_s(self) -> float:
        return (time.monotonic_ns() - self.heartbeat_ns) / 1e9


class StatusPage:
    def __init__(self, path: Path, *, create: bool = False, counts: Mapping[str, int] | None = None) -> None:
        """Map the page; `create` makes it first, with `counts` slots for each role, one where none is named.

        Raises: OSError when it cannot be opened or made, ValueError when another build has made it.
        """
        if create:
            _make(path, counts or {})
        fd = os.open(path, os.O_RDWR)
        try:
            self._map = mmap.mmap(fd, 0)
        finally:
            os.close(fd)
        try:
            self.counts = _read_header(path, self._map)
            """Slots of each role."""
        except ValueError:
            self._map.close()
            raise
        self._first: dict[str, int] = {}
        at = HEADER_BYTES
        for role, count in self.counts.items():
            self._first[role] = at
            at += count * SLOT_BYTES

    def slots(self) -> Iterator[tuple[str, int]]:
        """Return (role, index) of every slot."""
        for role, count in self.counts.items():
            for index in range(count):
                yield role, index

    def write(self, role: str, status: ProcessStatus, index: int = 0) -> None:
        """Replace the slot of a process. Call from its owner's work loop only."""
        at = self._slot_at(role, index)
        (count,) = _COUNTER.unpack_from(self._map, at)
        epoch, pid, state, *others = status
        _FIELDS.pack_into(self._map, _copy_at(at, count + 1), epoch, pid, STATES.index(state), *others)
        _COUNTER.pack_into(self._map, at, count + 1)

    def read(self, role: str, index: int = 0) -> ProcessStatus:
        """Return the slot of a process as its owner wrote it last; ProcessStatus() before it has."""
        at = self._slot_at(role, index)
        while True:
            (before,) = _COUNTER.unpack_from(self._map, at)
            epoch, pid, state, *others = _FIELDS.unpack_from(self._map, _copy_at(at, before))
            (after,) = _COUNTER.unpack_from(self._map, at)
            if before == after:
                return ProcessStatus(epoch, pid, STATES[state], *others)

    def close(self) -> None:
        self._map.close()

    def _slot_at(self, role: str, index: int) -> int:
        assert 0 <= index < self.counts[role]
        return self._first[role] + index * SLOT_BYTES


def _make(path: Path, counts: Mapping[str, int]) -> None:
    """Under another name until it is whole: whoever looks for it meanwhile finds nothing."""
    numbers = [counts.get(role, 1) for role in ROLES]
    new = path.with_suffix(".new")
    fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        # Not a hole: where the disk is full, the first write to one would be a SIGBUS.
        os.posix_fallocate(fd, 0, HEADER_BYTES + sum(numbers) * SLOT_BYTES)
        os.pwrite(fd, _HEADER.pack(MAGIC, VERSION, *numbers), 0)
    finally:
        os.close(fd)
    new.replace(path)


def _read_header(path: Path, page: mmap.mmap) -> dict[str, int]:
    """Slots of each role. Raises ValueError for a page that is not of this version, or not whole."""
    if len(page) < HEADER_BYTES:
        raise ValueError(f"{path} is not a status page")
    magic, version, *numbers = _HEADER.unpack_from(page)
    if magic != MAGIC:
        raise ValueError(f"{path} is not a status page of version {VERSION}")
    if version != VERSION:
        raise ValueError(f"{path} is a status page of version {version}; this build reads version {VERSION}")
    if len(page) != HEADER_BYTES + sum(numbers) * SLOT_BYTES:
        raise ValueError(f"{path} has {len(page)} bytes, which are not the slots that its header says")
    return dict(zip(ROLES, numbers, strict=True))


def _copy_at(slot_at: int, count: int) -> int:
    return slot_at + _COUNTER.size + count % 2 * _FIELDS.size
