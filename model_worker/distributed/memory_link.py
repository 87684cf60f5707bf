"""Stage link between two processes of one machine, through shared memory.

Data is in slots that are used in turn. A socket in the run directory says which step has arrived, and which
slot is free again. The end of a process is noticed at once, because its socket closes.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from model_worker.distributed.group import GroupError
from model_worker.distributed.link_end import Waiting, check_number, has_ended
from model_worker.distributed.shared_memory import LOOK_S, SLICE_S

HEADER = struct.Struct("<qq")
"""Format of the message about a step: its number, and its rows."""
OPENING = struct.Struct("<qq")
"""Format of the first message: bytes of a slot, and number of slots."""
FREE = b"\1"


class MemoryGivingEnd:
    """Sending end of a link through shared memory; see GivingEnd."""

    def __init__(
        self, end: socket.socket, slot_bytes: int, num_slots: int, *, stage: int, waiting: Waiting
    ) -> None:
        """Create the memory. stage: stage at the other end."""
        self._end, self._slot_bytes, self._num_slots = end, slot_bytes, num_slots
        self._stage, self._waiting = stage, waiting
        fd = os.memfd_create("carousel-stage")
        try:
            os.ftruncate(fd, slot_bytes * num_slots)
            self._memory = torch.frombuffer(mmap.mmap(fd, slot_bytes * num_slots), dtype=torch.uint8)
            socket.send_fds(end, [OPENING.pack(slot_bytes, num_slots)], [fd])
        finally:
            os.close(fd)
        self._num_sent = self._num_free_again = 0

    def send(self, step: int, num_rows: int, parts: Sequence[Tensor]) -> None:
        if self._num_sent - self._num_free_again == self._num_slots:
            _wait_readable(self._end, self._stage, self._waiting)
            self._num_free_again += len(_received(self._end, self._num_slots, self._stage))
        at = self._num_sent % self._num_slots * self._slot_bytes
        lay(parts, self._memory[at : at + self._slot_bytes])
        self._num_sent += 1
        try:
            self._end.sendall(HEADER.pack(step, num_rows))
        except OSError:
            raise has_ended(self._stage) from None

    def close(self) -> None:
        self._end.close()


class MemoryTakingEnd:
    """Receiving end of a link through shared memory; see TakingEnd."""

    def __init__(self, end: socket.socket, *, stage: int, waiting: Waiting) -> None:
        """Map the memory of the sending end. stage: stage at the other end. Raises GroupError."""
        self._end, self._stage, self._waiting = end, stage, waiting
        _wait_readable(end, stage, waiting)
        opening, fds, _, _ = socket.recv_fds(end, OPENING.size, 1)
        if not fds:
            raise has_ended(stage)
        self._slot_bytes, self._num_slots = OPENING.unpack(opening)
        try:
            memory = mmap.mmap(fds[0], self._slot_bytes * self._num_slots)
        finally:
            os.close(fds[0])
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)
        self._num_received = 0
        self._came = b""

    def receive(self, step: int) -> int:
        while len(self._came) < HEADER.size:
            _wait_readable(self._end, self._stage, self._waiting)
            self._came += _received(self._end, HEADER.size - len(self._came), self._stage)
        number, num_rows = HEADER.unpack(self._came)
        self._came = b""
        self._num_received += 1
        check_number(number, step, self._stage)
        return int(num_rows)

    def has_come(self) -> bool:
        return _is_readable(self._end, 0.0)

    def slot(self) -> Tensor:
        at = (self._num_received - 1) % self._num_slots * self._slot_bytes
        return self._memory[at : at + self._slot_bytes]

    def let_go(self) -> None:
        try:
            self._end.sendall(FREE)
        except OSError:
            raise has_ended(self._stage) from None

    def close(self) -> None:
        self._end.close()


def lay(parts: Sequence[Tensor], slot: Tensor) -> int:
    """Copy tensors into a slot [bytes], one after the other. Returns their total bytes."""
    at = 0
    for part in parts:
        data = part.contiguous().view(-1).view(torch.uint8)
        assert at + len(data) <= len(slot), "a step larger than any may be"
        slot[at : at + len(data)].copy_(data)
        at += len(data)
    return at


def _wait_readable(end: socket.socket, stage: int, waiting: Waiting) -> None:
    waiting.until(lambda seconds: _is_readable(end, seconds), stage)


def _is_readable(end: socket.socket, seconds: float) -> bool:
    poll = select.poll()
    poll.register(end, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _received(end: socket.socket, num_bytes: int, stage: int) -> bytes:
    try:
        data = end.recv(num_bytes)
    except OSError:
        data = b""
    if not data:
        raise has_ended(stage)
    return data


def listen(folder: Path, rank: int) -> socket.socket:
    """Listen for the rank before this one."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(_name(rank, fd))
        listener.listen(1)
    except BaseException:
        listener.close()
        raise
    finally:
        os.close(fd)
    return listener


def connect(folder: Path, rank: int, deadline: float, on_wait: Callable[[], None]) -> socket.socket:
    """Connect to a rank that listens in the folder, or soon will. Raises GroupError."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        while True:
            end = socket.socket(socket.AF_UNIX)
            try:
                end.connect(_name(rank, fd))
                return end
            except (FileNotFoundError, ConnectionRefusedError):
                end.close()
                if time.monotonic() > deadline:
                    raise GroupError(f"rank {rank} of the pipeline has not started in time") from None
                on_wait()
                time.sleep(LOOK_S)
    finally:
        os.close(fd)


def accept(listener: socket.socket, deadline: float, on_wait: Callable[[], None]) -> socket.socket:
    """Accept the connection of the rank before this one. Raises GroupError."""
    while not _is_readable(listener, SLICE_S):
        if time.monotonic() > deadline:
            raise GroupError("the stage before this one has not started in time")
        on_wait()
    end, _ = listener.accept()
    return end


def _name(rank: int, fd: int) -> str:
    """Return the address of a rank's socket. It goes through a file descriptor, because an address may only
    have 107 bytes.
    """
    return f"/proc/self/fd/{fd}/stage{rank}"
