"""Device: what the runner needs of one: streams of work, tickets for it, copies to and from, free memory.

One code path serves CPU and CUDA: work is a function handed to a stream, a ticket stands for its result.
On CPU the copy stream is the forward stream itself.

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
    """Handle of work that was launched."""

    def done(self) -> bool:
        """Tell whether the work is finished, or has failed. Never blocks."""

    def wait(self) -> T_co:
        """Block until the work is finished and return what it returned. Raises what it raised."""

    @property
    def has_failed(self) -> bool:
        """Tell whether it is known that the work has failed. Never blocks."""

    @property
    def value(self) -> T_co:
        """Return what the work returned, for work behind it in stream order: its tensors may be
        unfinished.
        """


class Outcome(Generic[T]):
    """Result of work, or what it raised, for tickets to be made of."""

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
        """Run `fn` once everything launched before it on this stream, and `after`, a ticket of the same
        device, is finished.

        Never raises what `fn` raises: the ticket does, and the stream goes on.
        """

    def close(self) -> None:
        """Finish what was launched and let go of the stream."""


class Graph(Protocol):
    """Work that was recorded."""

    def replay(self) -> None:
        """Do it again, on the current stream and the same memory."""


class Device(Protocol):
    name: str
    torch_device: torch.device
    forward_stream: Stream
    copy_stream: Stream
    prefers_one_pass: bool
    """True where looking at an intermediate result to do less work costs more than all of the work: it means
    to wait.
    """
    compiles_when_launched: bool
    """True where a kernel is compiled when it is launched first, and for another kind of arguments anew."""
    has_own_memory: bool
    """True where only this process's allocator divides the memory: what steps take of it can be measured."""
    replays_launches: bool
    """True where what `capture` returns launches again without the cost on the host."""
    launch_errors: tuple[type[Exception], ...]
    """Errors of a kernel that needs more registers or shared memory than the device has."""

    def free_bytes(self, *, cached: bool = True) -> int:
        """Return the bytes that may still be allocated on the device. cached: with what its allocator has
        kept of what was given back.
        """

    def host_block(self, size: int) -> Tensor:
        """Return an uninitialised int64 tensor [size] on the host, of the kind `upload` copies fastest."""

    def upload(self, host: Tensor) -> Tensor:
        """Return `host` on the device, in order of the current stream. On CPU it is the same memory."""

    def tensor(self, array: npt.NDArray[Any]) -> Tensor:
        """Return a copy of `array` on the device, in order of the current stream."""

    def download(self, tensor: Tensor) -> Tensor:
        """Return `tensor` on the host; it may be read once the ticket of the work that called this is
        done.
        """

    def current_stream(self) -> int | None:
        """Return the CUDA stream that work goes to now, as its address; None where there is none."""

    def capture(self, fn: Callable[[], None]) -> Graph:
        """Record what `fn` launches on the current stream; it has run once or twice by then.

        `fn` must neither wait for the device nor depend on anything but memory that outlives the graph.
        Raises what `fn` raises, torch.OutOfMemoryError among them.
        """

    def close(self) -> None: ...
