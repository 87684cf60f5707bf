"""StageLink: what a rank of a pipeline stage gets from the stage before it, and gives to the next one.

    stage k       hidden states of a step   ─►  stage k + 1
    last stage    tokens of a step          ─►  stage 0

Data lies in memory that both processes have mapped, in slots that are used in turn; a socket of the run
directory says which step has come, and which slot is free again. So a stage that has given away a step goes
on with the next one, and a process that ends is seen at once, as its socket closes.
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
from typing import NamedTuple

import torch
from torch import Tensor

from model_worker.distributed.group import LATE_S, GroupError
from model_worker.distributed.layout import Layout
from model_worker.distributed.shared_memory import LOOK_S, SLICE_S

HEADER = struct.Struct("<qq")
"""Format of what is in front of a step's data: number of the step; rows."""
OPENING = struct.Struct("<qq")
"""Format of the first message: bytes of a slot; number of slots."""
FREE = b"\1"
HIDDEN_SLOTS = 2
"""Number of slots: one is computed with while the next one comes."""


class SlotSizes(NamedTuple):
    hidden: int
    """Bytes of the largest step's hidden states, as they go from stage to stage."""
    tokens: int
    """Bytes of the most tokens that a step samples."""
    dtype: torch.dtype
    """Dtype of the hidden states."""
    width: int
    """Numbers in a row of the hidden states, in all tensors together."""


class StageLink:
    """Links of a rank to the stages before and behind it. Steps are taken in the order in which they were
    given.
    """

    def __init__(
        self,
        folder: Path,
        layout: Layout,
        sizes: SlotSizes,
        *,
        join_timeout_s: float,
        on_wait: Callable[[], None],
        late_s: float = LATE_S,
    ) -> None:
        """Meet the ranks of the stages before and behind, which are given the same folder. on_wait: called
        about every SLICE_S while another stage is waited for. Raises GroupError.
        """
        self.layout = layout
        self._sizes = sizes
        deadline = time.monotonic() + join_timeout_s
        # A step may lie behind as many others as there are stages.
        waiting = _Waiting(on_wait, late_s * (layout.num_stages + 1))
        listener = _listen(folder, layout.rank)
        try:
            self._next = _Sender(
                _connect(folder, layout.next_rank, deadline, on_wait),
                *(sizes.tokens, layout.num_stages + 2) if layout.is_last else (sizes.hidden, HIDDEN_SLOTS),
                stage=(layout.stage + 1) % layout.num_stages,
                waiting=waiting,
            )
            self._before = _Receiver(
                _accept(listener, deadline, on_wait),
                stage=(layout.stage - 1) % layout.num_stages,
                waiting=waiting,
            )
        finally:
            listener.close()

    def give_hidden(self, step: int, parts: Sequence[Tensor]) -> None:
        """Give the next stage a step's tensors [T, hidden_size], one after the other."""
        self._next.send(step, len(parts[0]), parts)

    def take_hidden(self, step: int, num_tokens: int) -> Tensor:
        """Wait for the step's numbers [parts, T, hidden_size], in memory that is this stage's until
        `let_go`.
        """
        num_rows = self._before.receive(step)
        if num_rows != num_tokens:
            raise GroupError(f"the stage before gave {num_rows} tokens of step {step}, not {num_tokens}")
        sizes = self._sizes
        data = self._before.slot()[: num_tokens * sizes.width * sizes.dtype.itemsize]
        return data.view(sizes.dtype)

    def let_go(self) -> None:
        """Give back the memory of the step that was taken last."""
        self._before.let_go()

    def give_tokens(self, step: int, tokens: Tensor) -> None:
        """Tell the first stage what the step has sampled, [S] int64."""
        self._next.send(step, len(tokens), [tokens])

    def take_tokens(self, step: int) -> Tensor:
        """Wait for the tokens [S] int64 of the step."""
        num_tokens = self._before.receive(step)
        tokens = self._before.slot()[: num_tokens * 8].view(torch.int64).clone()
        self._before.let_go()
        return tokens

    @property
    def has_tokens(self) -> bool:
        """Tell whether tokens have come that nobody has taken."""
        return self._before.has_come()

    def close(self) -> None:
        self._next.close()
        self._before.close()


class _Waiting(NamedTuple):
    on_wait: Callable[[], None]
    patience_s: float

    def until_readable(self, end: socket.socket, stage: int) -> None:
        """Raises GroupError when it takes too long."""
        poll = select.poll()
        poll.register(end, select.POLLIN)
        for _ in range(max(1, round(self.patience_s / SLICE_S))):  # see SharedMemoryGroup: slices are counted
            if poll.poll(SLICE_S * 1000):
                return
            self.on_wait()
        raise GroupError(f"pipeline stage {stage} has not come to a step within {self.patience_s:g} s")


class _Sender:
    def __init__(
        self, end: socket.socket, slot_bytes: int, num_slots: int, *, stage: int, waiting: _Waiting
    ) -> None:
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
            self._waiting.until_readable(self._end, self._stage)
            self._num_free_again += len(_received(self._end, self._num_slots, self._stage))
        at = self._num_sent % self._num_slots * self._slot_bytes
        end = at + self._slot_bytes
        for part in parts:
            data = part.contiguous().view(-1).view(torch.uint8)
            assert at + len(data) <= end, "a step larger than any may be"
            self._memory[at : at + len(data)].copy_(data)
            at += len(data)
        self._num_sent += 1
        try:
            self._end.sendall(HEADER.pack(step, num_rows))
        except OSError:
            raise GroupError(f"pipeline stage {self._stage} has ended") from None

    def close(self) -> None:
        self._end.close()


class _Receiver:
    def __init__(self, end: socket.socket, *, stage: int, waiting: _Waiting) -> None:
        self._end, self._stage, self._waiting = end, stage, waiting
        waiting.until_readable(end, stage)
        opening, fds, _, _ = socket.recv_fds(end, OPENING.size, 1)
        if not fds:
            raise GroupError(f"pipeline stage {stage} has ended")
        self._slot_bytes, self._num_slots = OPENING.unpack(opening)
        try:
            memory = mmap.mmap(fds[0], self._slot_bytes * self._num_slots)
        finally:
            os.close(fds[0])
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)
        self._num_received = 0
        self._came = b""

    def receive(self, step: int) -> int:
        """Return how many rows the step has, once it has come; they are in `slot`."""
        while len(self._came) < HEADER.size:
            self._waiting.until_readable(self._end, self._stage)
            self._came += _received(self._end, HEADER.size - len(self._came), self._stage)
        number, num_rows = HEADER.unpack(self._came)
        self._came = b""
        self._num_received += 1
        if number != step:
            raise GroupError(f"pipeline stage {self._stage} gave step {number} where step {step} was due")
        return int(num_rows)

    def has_come(self) -> bool:
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        return bool(poll.poll(0))

    def slot(self) -> Tensor:
        at = (self._num_received - 1) % self._num_slots * self._slot_bytes
        return self._memory[at : at + self._slot_bytes]

    def let_go(self) -> None:
        try:
            self._end.sendall(FREE)
        except OSError:
            raise GroupError(f"pipeline stage {self._stage} has ended") from None

    def close(self) -> None:
        self._end.close()


def _received(end: socket.socket, num_bytes: int, stage: int) -> bytes:
    try:
        data = end.recv(num_bytes)
    except OSError:
        data = b""
    if not data:
        raise GroupError(f"pipeline stage {stage} has ended")
    return data


def _name(folder: Path, rank: int, fd: int) -> str:
    """Address of a rank's socket. Through a descriptor, as an address has no more than 107 bytes."""
    return f"/proc/self/fd/{fd}/stage{rank}"


def _listen(folder: Path, rank: int) -> socket.socket:
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(_name(folder, rank, fd))
        listener.listen(1)
    except BaseException:
        listener.close()
        raise
    finally:
        os.close(fd)
    return listener


def _connect(folder: Path, rank: int, deadline: float, on_wait: Callable[[], None]) -> socket.socket:
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        while True:
            end = socket.socket(socket.AF_UNIX)
            try:
                end.connect(_name(folder, rank, fd))
                return end
            except (FileNotFoundError, ConnectionRefusedError):
                end.close()
                if time.monotonic() > deadline:
                    raise GroupError(f"rank {rank} of the pipeline has not started in time") from None
                on_wait()
                time.sleep(LOOK_S)
    finally:
        os.close(fd)


def _accept(listener: socket.socket, deadline: float, on_wait: Callable[[], None]) -> socket.socket:
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    while not poll.poll(SLICE_S * 1000):
        if time.monotonic() > deadline:
            raise GroupError("the stage before this one has not started in time")
        on_wait()
    end, _ = listener.accept()
    return end
