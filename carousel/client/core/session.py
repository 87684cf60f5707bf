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
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from carousel.client.core.labels import LabelBook
from carousel.client.core.mailbox import HandedOver, Mailbox, Put, TensorPart
from carousel.client.core.request.request_builder import build_request
from carousel.client.core.request.submission import Submission
from carousel.client.core.ring import Ring
from carousel.client.core.ring_state import Restart
from carousel.client.core.state.request_state import RequestState
from carousel.client.core.state.requests_in_flight import RequestsInFlight, pop_all
from carousel.client.core.stats import StatsOp
from carousel.client.tracing.request_span import RequestSpan, begin_span
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
    Usage,
)
from runtime.wire.transport import Framed

M = TypeVar("M", bound=Mailbox)
EXHAUSTED = ErrorInfo(f"a process of the runtime was replaced {MAX_ATTEMPT + 1} times under the request")


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
        self._labels = LabelBook() if labels is None else labels
        self._requests = RequestsInFlight(self._labels)
        self._after_wakes = after_wakes
        self._controls: dict[int, OpenControl] = {}
        self._request_numbers = itertools.count()
        self._control_numbers = itertools.count()
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
        return self._requests.num_sequences

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
            request = msgspec.structs.replace(request, trace=span.trace)
        if request.label and not submission.holds_label:
            self._labels.hold(request.tenant, request.label, number)
        with self._sending:
            state = RequestState(request, submission.sampling, put, self.connection.generation, self._clock())
            state.span = span
            self._requests.add(state)
            try:
                self.connection.submit(request, number)
            except CarouselError:
                self._requests.end(state)
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
        self._requests.note_left(request)  # before its end, which the I/O thread may report at any moment
        if self._requests.end(request):
            # Wakes another thread or task that still waits for it.
            request.put(RequestAborted("the stream was closed while it was read"))
            self._send_abort(request)

    def _send_abort(self, request: RequestState) -> None:
        handles = request.open_handles
        if handles:
            # If the connection has ended, its closing or the server's silence timer aborts all sequences of
            # this client.
            with contextlib.suppress(CarouselError):
                self.connection.abort(handles, request.number)

    def _send_last_abort(self, request: RequestState) -> None:
        """Abort a request that no caller waits for any more."""
        self._requests.note_left(request)
        self._send_abort(request)

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
        for request in self._requests.take_all():
            request.put(error)
        for control in pop_all(self._controls):
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
                request = self._requests.of_sequence(entry.handle)
                if request is not None:
                    request.put(TensorPart(entry, frame))

    def _deliver_outputs(self, outputs: Sequence[SequenceOutput]) -> None:
        for request in self._requests.deliver(outputs):
            self._send_last_abort(request)

    # -- recovery --------------------------------------------------------------------------------------------

    def _recover(self, restart: Restart) -> None:
        """Submit again what the replaced process may have lost."""
        self._repeat_aborts(restart)
        for request in self._requests:
            if request.generation < restart.generation and self._concerns(restart, request.number):
                self._submit_again(request, restart)
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

    def _submit_again(self, request: RequestState, restart: Restart) -> None:
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
                self._requests.rename(old, request, sequence)
                try:
                    self.connection.resubmit(message, request.number)
                except RequestError as error:
                    failed.append(_failure(sequence.handle, ErrorInfo(error.message, error.code)))
                except CarouselError:
                    return  # the connection has ended, and with it every request
        if self._requests.get(request.number) is None:  # its caller has left meanwhile
            self._requests.release(request)
            self._send_last_abort(request)
        elif request.is_aborted:
            self._send_abort(request)
        self._deliver_outputs(failed)

    def _repeat_aborts(self, restart: Restart) -> None:
        """Repeat the aborts of requests that no caller waits for, because they may have been lost, and forget
        these requests, because the process that would report their end may not know them any more.
        """
        for handle, number in self._requests.left():
            if self._concerns(restart, number):
                self._requests.forget_left(handle)
                with contextlib.suppress(CarouselError):
                    self.connection.abort((handle,), number)


def _failure(handle: bytes, error: ErrorInfo) -> SequenceOutput:
    """Return the terminal message of a sequence that is not submitted again."""
    return SequenceOutput(handle, finish=Finish("error", Usage(0, 0), error=error))


def _unanswered(restart: Restart) -> RequestError:
    text = f"collective_rpc: the {restart.role} was replaced before there was an answer; a rank may have died"
    return RequestError(text, code="worker_failed", status=503)
