"""Session: the sequences and control calls that are in flight on one connection, and who waits for each.

The synchronous and the asynchronous client differ only in the mailbox a waiter sleeps on and in the thread
that fills it; both are given. An entry leaves the book at its terminal, when its caller gives up, or when the
ring is gone: nobody waits for ever.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar, Unpack

import msgspec

from client.connection import Connection
from client.request_builder import Prompt, RequestOptions, build_request
from client.result import SequenceState, error_from_info
from runtime.endpoints import Endpoints
from runtime.errors import CarouselError, RequestAborted, RingClosed
from runtime.handle import make_handle
from runtime.messages import (
    AbortRequest,
    ControlReply,
    ControlRequest,
    ErrorInfo,
    OutputBatch,
    SequenceOutput,
)
from runtime.process import LaunchFile
from runtime.sampling_params import SamplingParams

Item: TypeAlias = SequenceOutput | ControlReply | CarouselError
ControlOp: TypeAlias = Literal["server_info", "flush_cache"]

MAX_SEQ = (1 << 32) - 1


class Mailbox(Protocol):
    def put(self, item: Item) -> None:
        """Keep an item and wake the one who waits. Called in the thread that `deliver` runs in."""


M = TypeVar("M", bound=Mailbox)


class Session(Generic[M]):
    def __init__(
        self,
        run_dir: Path,
        new_mailbox: Callable[[], M],
        deliver_in_thread: Callable[[Callable[[Any], None], Any], None],
        *,
        connect_timeout_s: float,
    ) -> None:
        """`deliver_in_thread` is called by the I/O thread: it runs a function where the mailboxes live."""
        self._run_dir = run_dir
        self._new_mailbox = new_mailbox
        self._sequences: dict[bytes, M] = {}
        self._controls: dict[int, M] = {}
        self._sequence_numbers = itertools.count()
        self._control_numbers = itertools.count()
        self._deliver_in_thread = deliver_in_thread
        self.connection = Connection(
            run_dir,
            on_message=lambda message: deliver_in_thread(self._deliver, message),
            on_closed=lambda error: deliver_in_thread(self.fail_all, error),
            connect_timeout_s=connect_timeout_s,
        )

    def max_in_flight(self) -> int:
        """How many sequences the server lets one caller have waiting without refusing any.

        Raises: RingClosed when the runtime has left.
        """
        try:
            launch = LaunchFile.read(Endpoints(self._run_dir).config_file)
        except OSError as error:
            raise RingClosed(f"the runtime at {self._run_dir} is gone: {error}") from None
        return max(1, launch.config.max_waiting)

    def open_sequence(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None,
        *,
        stream: bool,
        **options: Unpack[RequestOptions],
    ) -> tuple[SequenceState, M]:
        """Submit one sequence. Raises what `build_request` and `Connection.submit` do."""
        number = next(self._sequence_numbers)
        # A server's client outlives the 32 bits of `seq`; the index is free to go on, since every sequence is
        # its own request.
        handle = make_handle(self.connection.client_id, number & MAX_SEQ, number >> 32)
        request = build_request(handle, prompt, sampling, stream=stream, **options)
        mailbox = self._sequences[handle] = self._new_mailbox()
        try:
            self.connection.submit(request)
        except CarouselError:
            self._sequences.pop(handle, None)
            raise
        return SequenceState(request), mailbox

    def abort(self, handle: bytes) -> None:
        """Ask for the end of a sequence; its terminal comes as usual. Without effect when it has ended."""
        if handle in self._sequences:
            self._send_abort(AbortRequest((handle,)))

    def forget(self, handle: bytes) -> None:
        """End a sequence whose caller has left. Without effect when it has ended."""
        mailbox = self._sequences.pop(handle, None)
        if mailbox is not None:
            # For another thread or task that still waits for it.
            mailbox.put(RequestAborted("the stream was closed while it was read"))
            self._send_abort(AbortRequest((handle,)))

    def _send_abort(self, message: AbortRequest) -> None:
        # Where the connection has ended, its closing or the server's silence timer aborts all of ours.
        with contextlib.suppress(CarouselError):
            self.connection.submit_unrefused(message)

    def open_control(self, op: ControlOp) -> M:
        """Submit a question to the ring. Its answer is one ControlReply."""
        number = next(self._control_numbers)
        mailbox = self._controls[number] = self._new_mailbox()
        try:
            self.connection.submit(ControlRequest(self.connection.client_id, number, op))
        except CarouselError:
            self._controls.pop(number, None)
            raise
        return mailbox

    def end_all(self, error: CarouselError) -> None:
        """Abort what is in flight and give its callers `error`. Call `fail_all`
        once more when the connection has been closed: until then others may submit.
        """
        if self._sequences:
            self._send_abort(AbortRequest(client=self.connection.client_id))
        self.fail_all(error)

    def fail_all(self, error: CarouselError) -> None:
        """The one case in which a terminal is not the detokenizer's: nobody is there to send it."""
        for book in (self._sequences, self._controls):
            while book:
                _, mailbox = book.popitem()
                mailbox.put(error)

    def _deliver(self, message: OutputBatch | ControlReply) -> None:
        if isinstance(message, ControlReply):
            mailbox = self._controls.pop(message.number, None)
            if mailbox is not None:
                mailbox.put(message)
            return
        for output in message.outputs:
            if output.finish is None:
                mailbox = self._sequences.get(output.handle)
            else:
                mailbox = self._sequences.pop(output.handle, None)
            if mailbox is not None:
                mailbox.put(output)


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


def outputs_of(items: list[Item]) -> list[SequenceOutput]:
    """The outputs among a sequence's items. Raises the error among them."""
    outputs: list[SequenceOutput] = []
    for item in items:
        if isinstance(item, CarouselError):
            raise item.with_traceback(None)
        assert isinstance(item, SequenceOutput)
        outputs.append(item)
    return outputs
