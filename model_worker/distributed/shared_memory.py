"""SharedMemoryGroup: group of ranks on one machine, through shared memory.

    rank 0   creates the memory, which has no name, and writes into the run directory how to open it
    others   open it through rank 0's entry in /proc

So nothing is left behind, however the processes end. A wait is divided into slices, after each of which a
rank checks that the awaited ranks are still there. Timeouts count slices, so a group that was stopped as a
whole and continued later is not late.
"""

from __future__ import annotations

import mmap
import os
import select
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from model_worker.distributed.group import LATE_S, GroupError
from model_worker.kernels.native.calls import ExchangeCall, SumCall
from model_worker.kernels.native.library import DTYPES, NativeKernels

COUNTER_BYTES = 64
# Bytes of one rank's data in one round; more data takes several rounds. Small enough for a core's cache.
# Arbitrary.
SLOT_BYTES = 1 << 20
# A futex wait and wake-up takes some 50 us; by then the other ranks have usually come.
SPIN_NS = 20_000
SLICE_S = 0.05
LOOK_S = 0.005


class _Meeting(msgspec.Struct, frozen=True):
    """File that rank 0 writes into the run directory."""

    pid: int
    fd: int


class _Arrival(msgspec.Struct, frozen=True):
    pid: int


class SharedMemoryGroup:
    """RankGroup of processes that have joined in one folder."""

    def __init__(
        self,
        kernels: NativeKernels,
        folder: Path,
        rank: int,
        size: int,
        *,
        join_timeout_s: float,
        on_wait: Callable[[], None],
        late_s: float = LATE_S,
    ) -> None:
        """Join the other ranks; returns when all are there. folder: used by these ranks only. on_wait: called
        about every SLICE_S while waiting for others, now and later. Raises GroupError when one of them does
        not come in time.
        """
        self.rank = rank
        self.size = size
        self._kernels = kernels
        self._late_s = self._patience_s = late_s
        self._join_timeout_s = join_timeout_s
        self._on_wait = on_wait
        meeting = _Rendezvous(folder, rank, size, time.monotonic() + join_timeout_s, on_wait)
        self._map = meeting.join(size * COUNTER_BYTES + 2 * size * SLOT_BYTES)
        self._pidfds = meeting.pidfds
        self._memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self._region = self._memory.data_ptr()
        self._call = ExchangeCall(
            region=self._region,
            slot_bytes=SLOT_BYTES,
            # With more ranks than cores, a rank that spins would keep the core from the rank that it waits
            # for.
            spin_ns=SPIN_NS if size <= len(os.sched_getaffinity(0)) else 0,
            wait_ns=int(SLICE_S * 1e9),
            rank=rank,
            num_ranks=size,
        )
        self._sum = SumCall(slot_bytes=SLOT_BYTES, num_ranks=size)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum as in RankGroup.all_reduce, in place. Narrow dtypes are summed in float32 and rounded once."""
        assert x.is_contiguous()
        size, at_a_time = x.element_size(), SLOT_BYTES // x.element_size()
        flat = x.view(-1)
        for start in range(0, flat.shape[0], at_a_time):
            part = flat[start : start + at_a_time]
            slots = self._exchange(part.data_ptr(), part.shape[0] * size)
            if part.dtype in DTYPES:
                self._native_sum(slots, part)
            else:
                parts = [self._slot(slots, rank, part) for rank in range(self.size)]
                part.copy_(torch.stack(parts).float().sum(0))
        return x

    def gather(self, x: Tensor, width: int, out: Tensor | None = None) -> Tensor | None:
        """Gather as in RankGroup.gather."""
        assert x.is_contiguous()
        rows, own_width = x.shape
        gathered = x.new_empty(rows, self.size, own_width) if self.rank == 0 else None
        # Row by row; rows that do not fit are sent in parts.
        columns = min(own_width, SLOT_BYTES // x.element_size())
        at_a_time = max(1, SLOT_BYTES // (max(1, columns) * x.element_size()))
        for start in range(0, rows, at_a_time):
            for left in range(0, own_width, columns):
                part = x[start : start + at_a_time, left : left + columns].contiguous()
                slots = self._exchange(part.data_ptr(), part.numel() * part.element_size())
                if gathered is None:
                    continue
                for rank in range(self.size):
                    place = gathered[start : start + at_a_time, rank, left : left + columns]
                    place.copy_(self._slot(slots, rank, part))
        if gathered is None:
            return None
        shown = gathered.view(rows, self.size * own_width)[:, :width]
        return shown.contiguous() if out is None else out.copy_(shown)

    def broadcast(self, x: Tensor) -> Tensor:
        """Broadcast as in RankGroup.broadcast, in place."""
        assert x.is_contiguous()
        num_bytes = x.numel() * x.element_size()
        assert num_bytes <= SLOT_BYTES
        slots = self._exchange(x.data_ptr(), num_bytes)
        if self.rank != 0:
            x.copy_(self._slot(slots, 0, x))
        return x

    def smallest(self, number: int) -> int:
        """Return the smallest of all ranks' numbers, as in RankGroup.smallest."""
        self._patience_s = max(self._late_s, self._join_timeout_s)
        own = torch.tensor([number])
        slots = self._exchange(own.data_ptr(), own.element_size())
        self._patience_s = self._late_s
        return min(int(self._slot(slots, rank, own)) for rank in range(self.size))

    def close(self) -> None:
        """Close the descriptors of the other processes. The memory is freed when the last process ends."""
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        self._pidfds = {}

    def _exchange(self, address: int, num_bytes: int) -> int:
        """Exchange data in one round. Returns the offset of the round's slots, which stay valid until the
        round after next.
        """
        call = self._call
        call.round = (call.round + 1) & 0xFFFFFFFF
        call.data = address
        call.num_bytes = num_bytes
        call.is_posted = 0
        self._kernels.exchange(call)
        if call.missing >= 0:
            self._wait_on(call)
        parity: int = call.round & 1
        return self.size * (COUNTER_BYTES + parity * SLOT_BYTES)

    def _wait_on(self, call: ExchangeCall) -> None:
        for _ in range(max(1, round(self._patience_s / SLICE_S))):
            self._on_wait()
            # Checked before the wait, because data that an ended rank has left still counts.
            ended = [rank for rank, pidfd in self._pidfds.items() if _has_ended(pidfd)]
            self._kernels.exchange(call)
            if call.missing < 0:
                return
            if call.missing in ended:
                raise GroupError(f"tensor-parallel rank {call.missing} has ended")
        raise GroupError(
            f"tensor-parallel rank {call.missing} has not come to a step within {self._patience_s:g} s"
        )

    def _native_sum(self, slots: int, out: Tensor) -> None:
        call = self._sum
        call.slots = self._region + slots
        call.out = out.data_ptr()
        call.size = out.shape[0]
        call.dtype = DTYPES[out.dtype]
        self._kernels.sum(call)

    def _slot(self, slots: int, rank: int, like: Tensor) -> Tensor:
        """Return a rank's data of the round as a tensor like `like`. Copy it at once."""
        start = slots + rank * SLOT_BYTES
        num_bytes = like.numel() * like.element_size()
        return self._memory[start : start + num_bytes].view(like.dtype).view(like.shape)


class _Rendezvous:
    """Lets ranks that only know a folder find each other's processes and the shared memory."""

    def __init__(
        self, folder: Path, rank: int, size: int, deadline: float, on_wait: Callable[[], None]
    ) -> None:
        self.pidfds: dict[int, int] = {}
        self._folder = folder
        self._rank = rank
        self._size = size
        self._deadline = deadline
        self._on_wait = on_wait

    def join(self, num_bytes: int) -> mmap.mmap:
        if self._rank == 0:
            fd = os.memfd_create("carousel-ranks")
            os.ftruncate(fd, num_bytes)
            _write(self._name(0), _Meeting(os.getpid(), fd))
        else:
            meeting = msgspec.json.decode(self._read(0), type=_Meeting)
            self._watch(0, meeting.pid)
            fd = os.open(f"/proc/{meeting.pid}/fd/{meeting.fd}", os.O_RDWR)
            _write(self._name(self._rank), _Arrival(os.getpid()))
        memory = mmap.mmap(fd, num_bytes)
        for rank in range(1, self._size):
            if rank != self._rank:
                self._watch(rank, msgspec.json.decode(self._read(rank), type=_Arrival).pid)
        if self._rank != 0:
            os.close(fd)
        return memory

    def _name(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.json"

    def _watch(self, rank: int, pid: int) -> None:
        try:
            self.pidfds[rank] = os.pidfd_open(pid)
        except ProcessLookupError:
            raise GroupError(f"tensor-parallel rank {rank} has ended") from None

    def _read(self, rank: int) -> bytes:
        while True:
            try:
                return self._name(rank).read_bytes()
            except FileNotFoundError:
                if time.monotonic() > self._deadline:
                    raise GroupError(f"tensor-parallel rank {rank} has not started in time") from None
                self._on_wait()
                time.sleep(LOOK_S)


def _write(path: Path, message: msgspec.Struct) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(msgspec.json.encode(message))
    new.replace(path)


def _has_ended(pidfd: int) -> bool:
    """Return True if the process of a pidfd has ended, which makes the pidfd readable."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
