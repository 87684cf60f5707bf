"""Session: the requests and control calls that are in flight on one connection, and who waits for each.

The synchronous and the asynchronous client differ only in the mailbox a waiter sleeps on and in the thread
that fills it; both are given. A request leaves the books with its last terminal or its first error, when its
caller gives up, or when the ring is gone: nobody waits for ever.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar, Unpack

import msgspec

from client.connection import Connection
from client.request_builder import Prompt, RequestOptions, build_request
from client.request_state import RequestState, TensorPart
from client.result import error_from_info
from client.target import Target
from runtime.errors import CarouselError, InvalidRequest, RequestAborted
from runtime.handle import make_handle
from runtime.messages import (
    ControlReply,
    ControlRequest,
    ErrorInfo,
    OutputBatch,
    SequenceOutput,
    TensorBatch,
)
from runtime.sampling_params import SamplingParams
from runtime.transport import Framed

Item: TypeAlias = SequenceOutput | TensorPart | ControlReply | CarouselError
ControlOp: TypeAlias = Literal["server_info", "flush_cache"]


class Mailbox(Protocol):
    def put(self, item: Item) -> None:
        """Keep an item and wake the one who waits. Called in the thread that `deliver` runs in."""


M = TypeVar("M", bound=Mailbox)
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class InFlight:
    """A request that has not ended."""

    number: int
    mailbox: Mailbox
    handles: tuple[bytes, ...]
    label: str
    live: set[bytes]
    """Handles whose terminal has not come. Only the thread that delivers changes it."""


class Session(Generic[M]):
    def __init__(
        self,
        target: Target,
        new_mailbox: Callable[[], M],
        deliver_in_thread: Callable[[Callable[[Any], None], Any], None],
        *,
        connect_timeout_s: float,
    ) -> None:
        """`deliver_in_thread` is called by the I/O thread: it runs a function where the mailboxes live.

        Raises: RingClosed when there is no runtime at `target`.
        """
        self._new_mailbox = new_mailbox
        # Whoever takes a request out of `_requests` ends it: it happens once, whichever threads try.
        self._requests: dict[int, InFlight] = {}
        self._sequences: dict[bytes, InFlight] = {}
        self._labels: dict[str, int] = {}
        self._controls: dict[int, M] = {}
        self._request_numbers = itertools.count()
        self._control_numbers = itertools.count()
        self.connection = Connection(
            target,
            on_message=lambda message: deliver_in_thread(self._deliver, message),
            on_closed=lambda error: deliver_in_thread(self.fail_all, error),
            connect_timeout_s=connect_timeout_s,
        )

    def max_in_flight(self) -> int:
        """How many sequences the server lets one caller have waiting without refusing any. Valid once the
        connection is opened.
        """
        return max(1, self.connection.max_waiting)

    # -- requests --------------------------------------------------------------------------------------------

    def open_request(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None,
        *,
        stream: bool,
        **options: Unpack[RequestOptions],
    ) -> tuple[RequestState, M]:
        """Submit a request: what is known of it, and where its sequences' outputs arrive.

        Raises: what `submit` does.
        """
        mailbox = self._new_mailbox()
        return self.submit(prompt, sampling, mailbox, stream=stream, **options), mailbox

    def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None,
        mailbox: Mailbox,
        *,
        stream: bool,
        **options: Unpack[RequestOptions],
    ) -> RequestState:
        """As `open_request`, with a mailbox of the caller's; requests may share one.

        Raises: InvalidRequest that names the argument, also for a label that is in flight; what
        `Connection.submit` does. Nothing has then been sent.
        """
        number = next(self._request_numbers)
        handle = make_handle(self.connection.client_of(number), number)
        asked = SamplingParams() if sampling is None else sampling
        request = build_request(handle, prompt, asked, stream=stream, **options)
        state = RequestState(request, asked)
        handles = tuple(state.by_handle)
        self._hold_label(request.label, number)
        in_flight = InFlight(number, mailbox, handles, request.label, set(handles))
        for each in handles:
            self._sequences[each] = in_flight
        self._requests[number] = in_flight
        try:
            self.connection.submit(request, number)
        except CarouselError:
            self._end(in_flight)
            raise
        return state

    def abort(self, number: int) -> None:
        """Ask for the end of a request by RequestState.number; the terminals of its sequences come as usual.
        Without effect on one that has ended or never was.
        """
        in_flight = self._requests.get(number)
        if in_flight is not None:
            self._send_abort(in_flight)

    def forget(self, number: int) -> None:
        """End a request whose caller has left. Without effect on one that has ended."""
        in_flight = self._requests.get(number)
        if in_flight is not None and self._end(in_flight):
            # For another thread or task that still waits for it.
            in_flight.mailbox.put(RequestAborted("the stream was closed while it was read"))
            self._send_abort(in_flight)

    def _hold_label(self, label: str, number: int) -> None:
        if label and self._labels.setdefault(label, number) != number:
            raise InvalidRequest(
                f"label: a request labelled {label!r} is in flight; wait for its end or choose another",
                param="label",
                code="duplicate_label",
            )

    def _end(self, in_flight: InFlight) -> bool:
        """Take a request out of the books. True for the one caller who has."""
        if self._requests.pop(in_flight.number, None) is None:
            return False
        self._release(in_flight)
        return True

    def _release(self, in_flight: InFlight) -> None:
        for handle in in_flight.handles:
            self._sequences.pop(handle, None)
        if in_flight.label:
            del self._labels[in_flight.label]

    def _send_abort(self, in_flight: InFlight, but: Iterable[bytes] = ()) -> None:
        handles = tuple(in_flight.live.difference(but))
        if handles:
            # Where the connection has ended, its closing or the server's silence timer aborts all of ours.
            with contextlib.suppress(CarouselError):
                self.connection.abort(handles, in_flight.number)

    # -- control calls ---------------------------------------------------------------------------------------

    def open_control(self, op: ControlOp) -> M:
        """Submit a question to the ring. Its answer is one ControlReply."""
        number = next(self._control_numbers)
        mailbox = self._controls[number] = self._new_mailbox()
        try:
            self.connection.submit(ControlRequest(self.connection.client_of(0), number, op), 0)
        except CarouselError:
            self._controls.pop(number, None)
            raise
        return mailbox

    # -- the end ---------------------------------------------------------------------------------------------

    def end_all(self, error: CarouselError) -> None:
        """Abort what is in flight and give its callers `error`. Call `fail_all`
        once more when the connection has been closed: until then others may submit.
        """
        if self._requests:
            with contextlib.suppress(CarouselError):
                self.connection.abort_all()
        self.fail_all(error)

    def fail_all(self, error: CarouselError) -> None:
        """The one case in which a terminal is not the detokenizer's: nobody is there to send it."""
        for in_flight in _take_all(self._requests):
            self._release(in_flight)
            in_flight.mailbox.put(error)
        for mailbox in _take_all(self._controls):
            mailbox.put(error)

    # -- what arrives ----------------------------------------------------------------------------------------

    def _deliver(self, message: OutputBatch | ControlReply | Framed) -> None:
        if isinstance(message, OutputBatch):
            self._deliver_outputs(message)
        elif isinstance(message, ControlReply):
            mailbox = self._controls.pop(message.number, None)
            if mailbox is not None:
                mailbox.put(message)
        else:
            assert isinstance(message.message, TensorBatch)
            for entry, frame in zip(message.message.entries, message.frames, strict=True):
                in_flight = self._sequences.get(entry.handle)
                if in_flight is not None:
                    in_flight.mailbox.put(TensorPart(entry, frame))

    def _deliver_outputs(self, batch: OutputBatch) -> None:
        sequences = self._sequences
        failed: list[InFlight] = []
        for output in batch.outputs:
            in_flight = sequences.get(output.handle)
            if in_flight is None:
                continue
            if output.finish is not None:
                in_flight.live.discard(output.handle)
                sequences.pop(output.handle, None)
                # The books are closed before the caller can see the end: he may use the label again at once.
                if not in_flight.live:
                    self._end(in_flight)
                elif output.finish.reason == "error" and self._end(in_flight):
                    failed.append(in_flight)
            in_flight.mailbox.put(output)
        if failed:
            ended = [output.handle for output in batch.outputs if output.finish is not None]
            for in_flight in failed:
                self._send_abort(in_flight, but=ended)


def _take_all(book: dict[int, T]) -> Iterator[T]:
    """Empty a book that other threads use meanwhile: each entry goes to one of them."""
    while True:
        try:
            _, entry = book.popitem()
        except KeyError:
            return
        yield entry


def deadline_after(timeout: float | None, now: float) -> float | None:
    """When `timeout` seconds from `now` are over; None for never, and for longer than any clock can wait."""
    return None if timeout is None or timeout >= threading.TIMEOUT_MAX else now + timeout


def control_result(item: Item) -> Any:
    """The body of a reply as plain data. Raises the error it carries."""
    if isinstance(item, CarouselError):
        raise item.with_traceback(None)
    assert isinstance(item, ControlReply)
    if not item.ok:
        raise error_from_info(msgspec.msgpack.decode(item.body, type=ErrorInfo))
    return msgspec.msgpack.decode(item.body)
