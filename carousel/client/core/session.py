"""Session: the requests and control calls in flight on one connection, with the mailbox of each.

The synchronous and the asynchronous client only differ in the mailbox on which a waiter sleeps, and in the
thread that fills it; both are passed in. A request is removed with its last terminal message or its first
error, when its caller gives up, or when the ring is gone, so no caller waits for ever. When a process of the
ring was replaced, the requests that it may have lost are submitted again: each sequence under the handle of
its next attempt, with its output so far. Messages under the old handle are then dropped.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from carousel.client.core.labels import LabelBook
from carousel.client.core.mailbox import HandedOver, Item, Mailbox, Put, TensorPart
from carousel.client.core.request_builder import Submission, build_request
from carousel.client.core.result import error_from_info
from carousel.client.core.ring_state import Restart
from carousel.client.core.state.request_state import RequestState
from carousel.client.core.state.sequence_state import SequenceState
from carousel.client.core.stats import StatsOp
from carousel.client.tracing.request_span import RequestSpan, begin_span
from carousel.client.tracing.trace_context import trace_for_wire
from runtime.base.errors import CarouselError, RequestAborted, RequestError
from runtime.ring.tenants import OWNER
from runtime.wire.handle import MAX_ATTEMPT, make_handle
from runtime.wire.messages import (
    ControlOp,
    ControlReply,
    ControlRequest,
    ErrorInfo,
    Finish,
    OutputBatch,
    SequenceOutput,
    TensorBatch,
    ToTokenizer,
    Usage,
)
from runtime.wire.transport import Framed

M = TypeVar("M", bound=Mailbox)
T = TypeVar("T")
EXHAUSTED = ErrorInfo(f"a process of the runtime was replaced {MAX_ATTEMPT + 1} times under the request")


class Ring(Protocol):
    """Connection to the ring, as the session uses it. A request's number decides which tokenizer receives it
    and which detokenizer answers.
    """

    opened: Future[None]
    """Future that is resolved once all detokenizers have answered."""
    error: CarouselError | None
    """Reason why the connection has ended; None while it is open."""
    max_waiting: int
    """Maximum number of sequences that may wait in the ring. Like the following attributes, valid once
    `opened` is resolved.
    """
    client_ids: tuple[int, ...]
    """Client ids of the connection, one for each detokenizer."""
    run_dir: Path | None
    """The ring's run directory if it is on this machine; None over TCP."""

    @property
    def generation(self) -> int:
        """Number of restarts that were seen."""

    @property
    def has_room(self) -> bool:
        """Return True if the ring accepts requests, as far as is known."""

    def check_usable(self) -> None:
        """Raise the error with which any message would be refused, if there is one."""

    def client_of(self, number: int) -> int:
        """Return the client id with which the handles of this request start."""

    def lane_of(self, number: int) -> int:
        """Return the index of the detokenizer that answers this request."""

    def tokenizer_of(self, number: int) -> int:
        """Return the index of the tokenizer that receives this request."""

    def submit(self, message: ToTokenizer, number: int) -> None:
        """Send a message about request `number`, in order. Never blocks. Raises Overloaded if the server
        takes messages more slowly than they come, InvalidRequest if the message exceeds the bounds of the
        wire, and the connection's error if it has ended; nothing is then sent.
        """

    def resubmit(self, message: ToTokenizer, number: int) -> None:
        """Do what `submit` does, but never refuse for lack of room: resubmitted requests are bounded by those
        that were accepted.
        """

    def abort(self, handles: tuple[bytes, ...], number: int) -> None:
        """Abort these sequences of request `number`. Never refused, because aborts are bounded by accepted
        requests.
        """

    def abort_all(self) -> None:
        """Abort everything of this connection."""

    def close(self) -> None:
        """Send waiting messages within a moment, and end. May be called again."""


def _call(function: Callable[[Any], None], argument: Any) -> None:
    function(argument)


def _call_now(function: Callable[[], None]) -> None:
    function()


def _never_abandoned(_: bool) -> str:
    return ""


class OpenControl(NamedTuple):
    """A control call that has no answer yet."""

    request: ControlRequest
    put: Put
    lane: int
    """Index of the detokenizer that answers it."""


class Session(Generic[M]):
    def __init__(
        self,
        connect: Callable[..., Ring],
        new_mailbox: Callable[[], M],
        deliver_in_thread: Callable[[Callable[[Any], None], Any], None] = _call,
        *,
        after_wakes: Callable[[Callable[[], None]], None] = _call_now,
        labels: LabelBook | None = None,
        why_abandoned: Callable[[bool], str] = _never_abandoned,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """connect: makes the connection to the ring from the callbacks. deliver_in_thread: called for each
        delivery; it runs a function in the thread where the mailboxes are used; default: the calling thread.
        after_wakes: calls a function once all waiters are awake for whom there was output; default: at once.
        labels: book of labels in flight, if it is shared. why_abandoned: returns why nobody can use the
        session any more, which ends the connection, or ""; called in the I/O thread with whether nothing is
        in flight. Raises what `connect` does.
        """
        self._new_mailbox = new_mailbox
        # Taking a request out of `_requests` ends it, which happens once, whichever threads try.
        self._requests: dict[int, RequestState] = {}
        self._sequences: dict[bytes, tuple[RequestState, SequenceState]] = {}
        """Sequences without a terminal message, by the handle of the newest attempt."""
        self._labels = LabelBook() if labels is None else labels
        self._after_wakes = after_wakes
        self._controls: dict[int, OpenControl] = {}
        self._request_numbers = itertools.count()
        self._control_numbers = itertools.count()
        # Sequences whose callers have left and whose end has not arrived yet.
        self._left: dict[bytes, int] = {}
        # Keeps the attempts of a sequence in order. Calls from a destructor do not take it.
        self._sending = threading.Lock()
        self._clock = clock
        self.connection = connect(
            on_message=lambda message: deliver_in_thread(self._deliver, message),
            on_restart=lambda restart: deliver_in_thread(self._recover, restart),
            on_closed=lambda error: deliver_in_thread(self.fail_all, error),
            why_abandoned=lambda: why_abandoned(not self._requests and not self._controls),
        )

    def max_in_flight(self) -> int:
        """Return how many sequences the server lets one caller have waiting without refusing any. Valid once
        the connection is opened.
        """
        return max(1, self.connection.max_waiting)

    @property
    def num_in_flight(self) -> int:
        """Number of sequences that have not ended, as far as the client knows."""
        return len(self._sequences)

    # -- requests --------------------------------------------------------------------------------------------

    def open_request(self, submission: Submission) -> tuple[RequestState, M]:
        """Submit a request. Returns its state, and the mailbox for its output. Raises what `submit` does."""
        mailbox = self._new_mailbox()
        return self.submit(submission, mailbox.put), mailbox

    def submit(self, submission: Submission, put: Put) -> RequestState:
        """Submit a request of a caller that keeps the output itself. Raises InvalidRequest, which names the
        argument, also for a label that the same tenant has in flight; and what `Ring.submit` raises. Nothing
        is then sent.
        """
        span = None
        if "traceparent" not in submission.options:
            span = begin_span(submission.options.get("task", "generate"))
        try:
            return self._submit(submission, put, span)
        except CarouselError as error:
            if span is not None:
                span.end(error=error)
            raise

    def _submit(self, submission: Submission, put: Put, span: RequestSpan | None) -> RequestState:
        self.connection.check_usable()  # before the lock, which in a forked process may never be released
        number = next(self._request_numbers)
        handle = make_handle(self.connection.client_of(number), number)
        request = build_request(handle, submission)
        if span is not None:
            request = msgspec.structs.replace(request, trace=trace_for_wire(span.traceparent))
        if request.label and not submission.holds_label:
            self._labels.hold(request.tenant, request.label, number)
        with self._sending:
            state = RequestState(request, submission.sampling, put, self.connection.generation, self._clock())
            state.span = span
            self._sequences.update((each.handle, (state, each)) for each in state.sequences)
            self._requests[number] = state
            try:
                self.connection.submit(request, number)
            except CarouselError:
                self._end(state)
                raise
            except BaseException:  # an interrupt, before it was sent or after
                self.forget(number)
                raise
            state.pack_text()
        return state

    def abort(self, number: int) -> None:
        """Ask for the end of the request with this RequestState.number. The terminal messages of its
        sequences arrive as usual. No effect on one that has ended or is unknown.
        """
        request = self._requests.get(number)
        if request is not None:
            request.is_aborted = True
            self._send_abort(request)

    def forget(self, number: int) -> None:
        """End a request whose caller has left. No effect on one that has ended."""
        request = self._requests.get(number)
        if request is None:
            return
        self._note_left(request)  # before its end, which the I/O thread may report at any moment
        if self._end(request):
            # Wakes another thread or task that still waits for it.
            request.put(RequestAborted("the stream was closed while it was read"))
            self._send_abort(request)

    def _end(self, request: RequestState) -> bool:
        """Remove a request. Returns True for the one caller that has removed it."""
        if self._requests.pop(request.number, None) is None:
            return False
        self._release(request)
        return True

    def _release(self, request: RequestState) -> None:
        for sequence in request.sequences:
            self._sequences.pop(sequence.handle, None)
        self._labels.release(request.request.tenant, request.request.label, request.number)

    def _send_abort(self, request: RequestState) -> None:
        handles = request.open_handles
        if handles:
            # If the connection has ended, its closing or the server's silence timer aborts all sequences of
            # this client.
            with contextlib.suppress(CarouselError):
                self.connection.abort(handles, request.number)

    def _send_last_abort(self, request: RequestState) -> None:
        """Abort a request that no caller waits for any more."""
        self._note_left(request)
        self._send_abort(request)

    def _note_left(self, request: RequestState) -> None:
        """Note the sequences of a request whose caller leaves, until they end."""
        self._left.update(dict.fromkeys(request.open_handles, request.number))
        for sequence in request.sequences:
            if not sequence.is_open:  # it may have ended a moment ago
                self._left.pop(sequence.handle, None)

    # -- control calls ---------------------------------------------------------------------------------------

    def asking_stats(
        self, op: StatsOp, after: int, *, wait: bool = False, tenant: str = OWNER
    ) -> contextlib.AbstractContextManager[M]:
        """Ask for statistics, like `asking`, with the fields of ControlRequest."""
        own = self.connection.client_ids
        return self.asking(op, after=after, wait=wait, own=own, tenant=tenant)

    @contextlib.contextmanager
    def asking(self, op: ControlOp, lane: int = 0, **about: Any) -> Iterator[M]:
        """Send a control call with these fields, as a context manager. The answer is one ControlReply in the
        mailbox, from this lane. A caller that leaves earlier does not get it.
        """
        number = next(self._control_numbers)
        mailbox = self._new_mailbox()
        request = ControlRequest(self.connection.client_of(lane), number, op, **about)
        self._controls[number] = OpenControl(request, mailbox.put, lane)
        try:
            self.connection.submit(request, lane)
            yield mailbox
        finally:
            self._controls.pop(number, None)

    # -- the end ---------------------------------------------------------------------------------------------

    def end_all(self, error: CarouselError) -> None:
        """Abort requests in flight and give their callers `error`. Call `fail_all` again when the connection
        is closed, because other threads may submit until then.
        """
        if self._requests:
            with contextlib.suppress(CarouselError):
                self.connection.abort_all()
        self.fail_all(error)

    def fail_all(self, error: CarouselError) -> None:
        """Give all waiting callers an error. This is the only case in which a terminal message does not come
        from the detokenizer, because the ring is gone.
        """
        for request in _take_all(self._requests):
            self._release(request)
            request.put(error)
        for control in _take_all(self._controls):
            control.put(error)

    # -- what arrives ----------------------------------------------------------------------------------------

    def _deliver(self, message: OutputBatch | ControlReply | Framed | HandedOver) -> None:
        if isinstance(message, OutputBatch):
            self._deliver_outputs(message.outputs)
        elif isinstance(message, HandedOver):
            self._after_wakes(partial(message.give_back, message.num_bytes))
        elif isinstance(message, ControlReply):
            control = self._controls.pop(message.number, None)
            if control is not None:
                control.put(message)
        else:
            assert isinstance(message.message, TensorBatch)
            for entry, frame in zip(message.message.entries, message.frames, strict=True):
                known = self._sequences.get(entry.handle)
                if known is not None:
                    known[0].put(TensorPart(entry, frame))

    def _deliver_outputs(self, outputs: Sequence[SequenceOutput]) -> None:
        sequences = self._sequences
        failed: list[RequestState] = []
        for output in outputs:
            known = sequences.get(output.handle)
            if known is None:
                if self._left and output.finish is not None:
                    self._left.pop(output.handle, None)
                continue
            request, sequence = known
            if request.has_logprobs:
                sequence.note_logprobs(output)
            if output.finish is None:
                sequence.ids += output.token_ids
                sequence.num_noted_chars += len(output.text)
            else:
                sequence.is_open = False
                if self._left:
                    self._left.pop(output.handle, None)
                sequence.ids.clear()  # the sequence is not sent again
                request.num_open -= 1
                sequences.pop(output.handle, None)
                # The request is removed before the caller can see the end, because the caller may use the
                # label again at once.
                if not request.num_open:
                    self._end(request)
                elif output.finish.reason == "error" and self._end(request):
                    failed.append(request)
            request.put(output)
        for request in failed:
            ended = {output.handle for output in outputs if output.finish is not None}
            for sequence in request.sequences:
                sequence.is_open = sequence.is_open and sequence.handle not in ended
            self._send_last_abort(request)

    # -- recovery --------------------------------------------------------------------------------------------

    def _recover(self, restart: Restart) -> None:
        """Submit again what the replaced process may have lost."""
        self._repeat_aborts(restart)
        for request in list(self._requests.values()):
            if request.generation < restart.generation and self._concerns(restart, request.number):
                self._make_again(request, restart)
        for control in list(self._controls.values()):
            if not self._concerns(restart, control.lane):
                continue
            if control.request.op == "collective_rpc":
                # Not sent again: a method that ends its process would end the next one, too.
                self._controls.pop(control.request.number, None)
                control.put(_unanswered(restart))
            else:
                with contextlib.suppress(CarouselError):
                    self.connection.resubmit(control.request, control.lane)

    def _concerns(self, restart: Restart, number: int) -> bool:
        """Return True if request `number` passes through the process."""
        if restart.role == "engine":
            return True
        index_of = self.connection.tokenizer_of if restart.role == "tokenizer" else self.connection.lane_of
        return index_of(number) == restart.index

    def _make_again(self, request: RequestState, restart: Restart) -> None:
        failed: list[SequenceOutput] = []
        with self._sending:
            request.generation = restart.generation
            for sequence in request.sequences:
                if not sequence.is_open or (restart.role == "tokenizer" and sequence.is_with_scheduler):
                    continue  # it has ended, or reached the scheduler long ago
                old = sequence.handle
                message = request.next_attempt(sequence, self._clock())
                if message is None:
                    failed.append(_failure(old, EXHAUSTED))
                    continue
                self._sequences.pop(old, None)
                self._sequences[sequence.handle] = request, sequence
                try:
                    self.connection.resubmit(message, request.number)
                except RequestError as error:
                    failed.append(_failure(sequence.handle, ErrorInfo(error.message, error.code)))
                except CarouselError:
                    return  # the connection has ended, and with it every request
        if request.number not in self._requests:  # its caller has left meanwhile
            self._release(request)
            self._send_last_abort(request)
        elif request.is_aborted:
            self._send_abort(request)
        self._deliver_outputs(failed)

    def _repeat_aborts(self, restart: Restart) -> None:
        """Repeat the aborts of requests that no caller waits for, because they may have been lost, and forget
        these requests, because the process that would report their end may not know them any more.
        """
        for handle, number in list(self._left.items()):
            if self._concerns(restart, number):
                self._left.pop(handle, None)
                with contextlib.suppress(CarouselError):
                    self.connection.abort((handle,), number)


def _take_all(book: dict[int, T]) -> Iterator[T]:
    """Empty a book that other threads use, so that each entry is returned to only one of them."""
    while True:
        try:
            _, entry = book.popitem()
        except KeyError:
            return
        yield entry


def _failure(handle: bytes, error: ErrorInfo) -> SequenceOutput:
    """Return the terminal message of a sequence that is not submitted again."""
    return SequenceOutput(handle, finish=Finish("error", Usage(0, 0), error=error))


def deadline_after(timeout: float | None, now: float) -> float | None:
    """Return the time `timeout` seconds after `now`; None for no limit, and for a time beyond the range of
    clocks.
    """
    return None if timeout is None or timeout >= threading.TIMEOUT_MAX else now + timeout


def _unanswered(restart: Restart) -> RequestError:
    text = f"collective_rpc: the {restart.role} was replaced before there was an answer; a rank may have died"
    return RequestError(text, code="worker_failed", status=503)


def control_result(item: Item) -> Any:
    """Return the body of a reply as plain data. Raises its error."""
    if isinstance(item, CarouselError):
        raise item.with_traceback(None)
    assert isinstance(item, ControlReply)
    if not item.ok:
        raise error_from_info(msgspec.msgpack.decode(item.body, type=ErrorInfo))
    return msgspec.msgpack.decode(item.body)
