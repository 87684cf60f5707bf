"""Device: interface to streams of work, tickets for their results, copies to and from the device, and free
memory.

One code path serves CPU and CUDA: work is a function that is launched on a stream, and a ticket stands for
its result. On a CPU the copy stream is the forward stream itself.

    forward stream   plan N: tables, forward, sampling │ plan N + 1 …
    copy stream                                        └ copy back N │ …
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import numpy.typing as npt
import torch
from torch import Tensor

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Ticket(Protocol[T_co]):
    """Handle of launched work."""

    def done(self) -> bool:
        """Return True if the work is finished or has failed. Never blocks."""

    def wait(self) -> T_co:
        """Wait until the work is finished and return its result. Raises the exception that it raised."""

    @property
    def has_failed(self) -> bool:
        """Return True if the work is known to have failed. Never blocks."""

    @property
    def value(self) -> T_co:
        """Return the result for use by later work in stream order. Its tensors may be unfinished."""


class Outcome(Generic[T]):
    """Result of work, or the exception that it raised; used by tickets."""

    __slots__ = ("_error", "_value")

    _value: T
    _error: BaseException | None

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    @property
    def value(self) -> T:
        if self._error is not None:
            raise self._error
        return self._value


class Stream(Protocol):
    def launch(self, fn: Callable[[], T], after: Any = None) -> Ticket[T]:
        """Run `fn` when everything launched before on this stream, and the ticket `after` of the same device,
        is finished. An exception in `fn` is raised by the ticket only, and the stream continues.
        """

    def close(self) -> None:
        """Finish all launched work and release the stream."""


class Graph(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Run the work again, on the current stream and the same memory."""


class Device(Protocol):
    name: str
    torch_device: torch.device
    forward_stream: Stream
    copy_stream: Stream
    prefers_one_pass: bool
    """True if looking at an intermediate result in order to do less work costs more than all of the work,
    because it means waiting for the device.
    """
    compiles_when_launched: bool
    """True if a kernel is compiled at its first launch, and again for another kind of arguments."""
    has_own_memory: bool
    """True if only this process's allocator divides the memory, so that the memory of steps can be measured.
    """
    replays_launches: bool
    """True if the result of `capture` launches again without the host's cost of launching."""
    launch_errors: tuple[type[Exception], ...]
    """Exceptions for a kernel that needs more registers or shared memory than the device has."""

    def free_bytes(self, *, cached: bool = True) -> int:
        """Return the bytes that may still be allocated on the device. cached: count memory that its allocator
        keeps for reuse.
        """

    def host_block(self, size: int) -> Tensor:
        """Return an uninitialised int64 tensor [size] in host memory from which `upload` is fastest."""

    def upload(self, host: Tensor) -> Tensor:
        """Return a copy of `host` on the device, in the order of the current stream. On a CPU it is the same
        memory.
        """

    def tensor(self, array: npt.NDArray[Any]) -> Tensor:
        """Return a copy of `array` on the device, in the order of the current stream."""

    def download(self, tensor: Tensor) -> Tensor:
        """Return a copy of `tensor` in host memory. It may be read when the ticket of the calling work is
        done.
        """

    def current_stream(self) -> int | None:
        """Return the address of the current CUDA stream; None on other devices."""

    def capture(self, fn: Callable[[], None]) -> Graph:
        """Record what `fn` launches on the current stream, calling it once or twice. `fn` must not wait
        for the device, and must depend only on memory that outlives the graph. Raises the exceptions of `fn`,
        including torch.OutOfMemoryError.
        """

    def close(self) -> None: ...
