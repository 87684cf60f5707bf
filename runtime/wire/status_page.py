"""StatusPage: a small file that every process of the ring has mapped, with a slot for each.

    header: magic (4) | version (2) | processes of each role (2 each)
    slot:   counter (8) | copy 0 | copy 1        the valid copy is number counter mod 2

Only its owner's work loop writes a slot: into the other copy, and then it increments the counter. All
processes read slots, and read again if the counter has changed meanwhile. So an owner that is delayed or dies
during a write does not block readers, which see its last complete write. Because the loop itself writes, the
heartbeat stops when the loop does; a thread's would not.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, NamedTuple, TypeAlias

from msgspec import Meta

from runtime.wire.format import Count, Message, Record
from runtime.wire.handle import NO_HANDLE

# Native, so that the counter is written in one go; with a byte order struct would write byte by byte.
_COUNTER = struct.Struct("@Q")
_FIELDS = struct.Struct("<IIBxxxxxxxQIIQIIfQQQIQQIQ16s?xxxf??")
_EPOCH = struct.Struct("<I")
"""First of the fields."""
MAGIC = b"CRSP"
VERSION = 12
HEADER_BYTES = 256
SLOT_BYTES = 512
ROLES = ("launcher", "scheduler", "worker", "tokenizer", "detokenizer", "api", "grammar")
_HEADER = struct.Struct(f"<4sH{len(ROLES)}H")
STATES = ("absent", "loading", "ready", "draining", "failed", "restarting")


class ProcessStatus(NamedTuple):
    """State of one process, as it reports it. Only the scheduler fills the fields after `heartbeat_ns`, with
    these exceptions: `num_received`, `num_sent`, `num_clients`, `recovery_ns`, and `num_running`, which
    counts in a tokenizer the sequences whose prompts it is encoding, in a detokenizer its sequences without a
    terminal, and in an API server the callers that wait for an answer.
    """

    epoch: int = 0
    pid: int = 0
    state: str = "absent"
    heartbeat_ns: int = 0
    """Time of the last turn of its work loop, on CLOCK_MONOTONIC."""
    num_running: int = 0
    num_waiting: int = 0
    queued_prompt_tokens: int = 0
    num_free_pages: int = 0
    num_pages: int = 0
    tokens_per_s: float = 0.0
    max_len: int = 0
    """Maximum number of tokens of a sequence, prompt and output; 0 while unknown."""
    num_received: int = 0
    """Number of requests that the scheduler has received since its start; for a tokenizer or a detokenizer,
    the number of messages. In the scheduler's slot this, `num_running` and `num_waiting` are of one moment,
    at most a step ago; requests that the tokenizers have sent beyond that number are on the way.
    """
    num_sent: int = 0
    """Number of sequences that this tokenizer has sent on since its start; for a detokenizer, of messages
    sent to clients.
    """
    batch_size: int = 0
    """Number of sequences in the scheduler's newest step; 0 if it had nothing to compute."""
    num_launched: int = 0
    """Number of steps that the scheduler has sent to the worker since its start."""
    num_finished: int = 0
    """Number of steps whose results the scheduler has. If this stays behind num_launched, the worker is
    stuck.
    """
    num_clients: int = 0
    """Number of clients connected to a detokenizer, processes of the HTTP server included."""
    recovery_ns: int = 0
    """Time on CLOCK_MONOTONIC of the last event after which requests are submitted again. In the launcher's
    slot, the last time that a process being replaced was not ready; in a detokenizer's, the last time that a
    client came back under its id.
    """
    solitary: bytes = NO_HANDLE
    """Handle of the scheduler's sequence that runs alone because the engine died under it before, or
    NO_HANDLE.
    """

    is_paused: bool = False
    """True while the scheduler launches no step until generation is continued."""
    loaded: float = 0.0
    """Share of the weights that is loaded, by a worker, or by a scheduler that has it in its process."""
    is_profiling: bool = False
    """True while the scheduler takes a profile."""
    is_in_call: bool = False
    """True while the scheduler has an open call to ranks, during which no step is launched."""

    def age_s(self) -> float:
        return (time.monotonic_ns() - self.heartbeat_ns) / 1e9


class StatusPage:
    def __init__(self, path: Path, *, create: bool = False, counts: Mapping[str, int] | None = None) -> None:
        """Map the page. With `create`, make it first, with counts[role] slots for each role, or one. Raises
        OSError when it cannot be opened or made, ValueError if another build has made it.
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
            """Number of slots of each role."""
        except ValueError:
            self._map.close()
            raise
        self._seen: dict[int, tuple[int, ProcessStatus]] = {}
        """Latest reading of each slot, with the number of writes before. Decoding it takes eight times as
        long as to see that nothing was written, and each request looks at three slots.
        """
        self._first: dict[str, int] = {}
        at = HEADER_BYTES
        for role, count in self.counts.items():
            self._first[role] = at
            at += count * SLOT_BYTES

    def slots(self) -> Iterator[tuple[str, int]]:
        """Yield (role, index) of every slot."""
        for role, count in self.counts.items():
            for index in range(count):
                yield role, index

    def write(self, role: str, status: ProcessStatus, index: int = 0) -> None:
        """Replace the slot of a process. Call it from its owner's work loop only."""
        at = self._slot_at(role, index)
        (count,) = _COUNTER.unpack_from(self._map, at)
        epoch, pid, state, *others = status
        _FIELDS.pack_into(self._map, _copy_at(at, count + 1), epoch, pid, STATES.index(state), *others)
        _COUNTER.pack_into(self._map, at, count + 1)

    def read(self, role: str, index: int = 0) -> ProcessStatus:
        """Return the slot of a process as its owner last wrote it; ProcessStatus() before that."""
        at = self._slot_at(role, index)
        while True:
            (before,) = _COUNTER.unpack_from(self._map, at)
            seen = self._seen.get(at)
            if seen is not None and seen[0] == before:
                return seen[1]
            fields = list(_FIELDS.unpack_from(self._map, _copy_at(at, before)))
            (after,) = _COUNTER.unpack_from(self._map, at)
            if before == after:
                fields[2] = STATES[fields[2]]
                # The same as a call with so many arguments, which takes longer.
                status = ProcessStatus._make(fields)
                self._seen[at] = before, status
                return status

    def read_epoch(self, role: str, index: int = 0) -> int:
        """Return the epoch in a slot, as `read` does, in a quarter of its time if the slot has changed."""
        at = self._slot_at(role, index)
        while True:
            (before,) = _COUNTER.unpack_from(self._map, at)
            (epoch,) = _EPOCH.unpack_from(self._map, _copy_at(at, before))
            (after,) = _COUNTER.unpack_from(self._map, at)
            if before == after:
                return int(epoch)

    def close(self) -> None:
        self._map.close()

    def _slot_at(self, role: str, index: int) -> int:
        assert 0 <= index < self.counts[role]
        return self._first[role] + index * SLOT_BYTES


def _make(path: Path, counts: Mapping[str, int]) -> None:
    """Create the file under another name and rename it when it is complete, so that no process maps a part of
    it.
    """
    numbers = [counts.get(role, 1) for role in ROLES]
    new = path.with_suffix(".new")
    fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        # Allocated, not a hole: on a full disk the first write to a hole would raise SIGBUS.
        os.posix_fallocate(fd, 0, HEADER_BYTES + sum(numbers) * SLOT_BYTES)
        os.pwrite(fd, _HEADER.pack(MAGIC, VERSION, *numbers), 0)
    finally:
        os.close(fd)
    new.replace(path)


def _read_header(path: Path, page: mmap.mmap) -> dict[str, int]:
    """Return the number of slots of each role. Raises ValueError for a page of another version, or an
    incomplete one.
    """
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


class ProcessState(Record, frozen=True):
    epoch: Count = 0
    """Epoch of the process, which grows with each restart; 0: unknown."""
    is_ready: bool = True


Processes: TypeAlias = Annotated[tuple[ProcessState, ...], Meta(max_length=64)]


class RingStatus(Message, frozen=True):
    """Content of the status page for clients that cannot read the file: restarts and load."""

    state: Annotated[str, Meta(max_length=32)]
    num_running: Count
    num_waiting: Count
    num_free_pages: Count
    engine: ProcessState = ProcessState()
    tokenizers: Processes = ()
    detokenizers: Processes = ()
