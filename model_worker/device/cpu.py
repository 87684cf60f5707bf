"""The CPU as a device. A stream is a thread, or the caller itself if the worker has a process of its own."""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model_worker.device.base import Outcome, Stream
from runtime.base.cgroup import memory_left, memory_limit

T = TypeVar("T")

# Numbers of these options in malloc.h, and the largest values that glibc accepts.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MAX_TRIM_THRESHOLD, MAX_MMAP_THRESHOLD = (1 << 31) - 1, 32 << 20


def give_back_freed_memory() -> None:
    """Return memory that tensors have freed to the system, if the C library is glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_freed_memory() -> None:
    """Keep memory that tensors free in the process from now on, after returning the memory that was freed
    before.

    Otherwise activations of a few megabytes are pages that the kernel fills with zeros in each step, which
    takes a quarter of the time of 2,048 tokens of a small model; and weights that were quantised while they
    were loaded would take their memory twice. Does nothing if the C library is not glibc.
    """
    give_back_freed_memory()
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAX_MMAP_THRESHOLD)
        mallopt(M_TRIM_THRESHOLD, MAX_TRIM_THRESHOLD)


class CpuTicket(Outcome[T]):
    __slots__ = ("_finished", "_fn")

    def __init__(self, fn: Callable[[], T]) -> None:
        self._fn: Callable[[], T] | None = fn
        self._finished = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        assert self._fn is not None
        try:
            self._value = self._fn()
        except BaseException as error:  # whatever it is, the waiting thread must learn of it
            self._error = error
        finally:
            self._fn = None
            self._finished.set()

    def done(self) -> bool:
        return self._finished.is_set()

    def wait(self) -> T:
        self._finished.wait()
        return self.value


_Launch = tuple[CpuTicket[Any], CpuTicket[Any] | None]


class DoneTicket(Outcome[T]):
    """Ticket of work that was finished when it was launched."""

    __slots__ = ()

    def __init__(self, fn: Callable[[], T]) -> None:
        self._error: BaseException | None = None
        try:
            self._value = fn()
        except BaseException as error:  # whatever it is, the waiting thread must learn of it
            self._error = error

    def done(self) -> bool:
        return True

    def wait(self) -> T:
        return self.value


class InlineStream:
    """Stream of the caller itself: work is finished when `launch` returns."""

    def launch(self, fn: Callable[[], T], after: DoneTicket[Any] | None = None) -> DoneTicket[T]:
        return DoneTicket(fn)

    def close(self) -> None:
        """Do nothing: the stream holds no resources."""


class ThreadedStream:
    """Stream with a thread of its own: work runs in order, and the caller does not wait."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[_Launch | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            ticket, after = item
            if after is not None:
                after._finished.wait()
            ticket.run()

    def launch(self, fn: Callable[[], T], after: CpuTicket[Any] | None = None) -> CpuTicket[T]:
        ticket = CpuTicket(fn)
        self._queue.put((ticket, after))
        return ticket

    def close(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()


class Rerun:
    """Graph for a device that cannot record: it calls the function again."""

    def __init__(self, fn: Callable[[], None]) -> None:
        self.replay = fn


class CpuDevice:
    name = "cpu"
    torch_device = torch.device("cpu")
    prefers_one_pass = False
    compiles_when_launched = False
    has_own_memory = False
    replays_launches = False
    launch_errors: tuple[type[Exception], ...] = ()

    def __init__(self, *, threaded: bool, index: int = 0) -> None:
        """index: ignored, since there is one CPU."""
        self.forward_stream: Stream = ThreadedStream("forward") if threaded else InlineStream()
        # Results are in host memory already: a second thread would only add a switch.
        self.copy_stream: Stream = self.forward_stream

    def free_bytes(self, *, cached: bool = True) -> int:
        """Return the bytes that the kernel can give without swapping, at most what the control group leaves.
        cached: first return to the system what loading has freed. A KV cache in its place would take memory
        before it is written.
        """
        if cached:
            give_back_freed_memory()
        return min(_memory_available(), memory_left())

    def host_block(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int64)

    def upload(self, host: Tensor) -> Tensor:
        return host

    def tensor(self, array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.array(array))

    def download(self, tensor: Tensor) -> Tensor:
        return tensor

    def current_stream(self) -> None:
        return None

    def capture(self, fn: Callable[[], None]) -> Rerun:
        fn()
        return Rerun(fn)

    def close(self) -> None:
        self.forward_stream.close()


def memory_bytes() -> int:
    """Return the bytes of memory of this machine, at most the limit of the control group."""
    return min(_meminfo("MemTotal"), memory_limit())


def _memory_available() -> int:
    return _meminfo("MemAvailable")


def _meminfo(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/meminfo has no {name}")
