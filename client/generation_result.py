"""GenerationResult: the future of one request, for any thread and any event loop, and what it delivers.

The I/O thread only puts items into the mailbox; they are folded into the sequence's state by whoever looks.
Knows no connection: how to abort is given.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from client.generation_request import GenerationRequest
from client.result import Delta, FinishReason, SequenceState, TokenLogprob
from client.session import Item, deadline_after
from runtime.errors import CarouselError, RequestError
from runtime.messages import SequenceOutput, Usage


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """A sequence so far, and what is new of it since the last output that was taken."""

    index: int
    """Number of the sequence in its request."""
    text: str
    token_ids: list[int]
    """Generated ids; the prompt is not among them."""
    text_diff: str
    token_ids_diff: list[int]
    logprobs: list[TokenLogprob]
    """One for each of token_ids; empty when logprobs were not asked for."""
    finish_reason: FinishReason | None = None
    """None while the sequence goes on; the last output has one."""
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended it."""
    cumulative_logprob: float | None = None
    """Of a finished sequence with logprobs."""
    usage: Usage | None = None
    """Of a finished sequence."""

    @property
    def outputs(self) -> list[CompletionOutput]:
        """The sequences of the request: this one."""
        return [self]


class ResultMailbox:
    """What has come for a result and was not looked at yet. Counts what it is given, so that a waiter can ask
    for more than it has seen, whoever else looks meanwhile.
    """

    __slots__ = ("_changed", "_items", "_listeners", "ended", "num_put")

    def __init__(self) -> None:
        self.ended = False
        """The terminal, or the error that takes its place, has come."""
        self.num_put = 0
        self._changed = threading.Condition()
        self._items: list[Item] = []
        self._listeners: list[Callable[[], None]] = []

    def put(self, item: Item) -> None:
        with self._changed:
            self._items.append(item)
            self.num_put += 1
            if isinstance(item, CarouselError) or (
                isinstance(item, SequenceOutput) and item.finish is not None
            ):
                self.ended = True
            self._changed.notify_all()
            listeners = tuple(self._listeners)
        for listener in listeners:
            listener()

    def take(self) -> list[Item]:
        """What is there, without waiting; maybe nothing."""
        with self._changed:
            items, self._items = self._items, []
            return items

    def wait(self, condition: Callable[[], bool], deadline: float | None) -> None:
        """Until `condition` of this mailbox holds. Raises TimeoutError at the deadline."""
        with self._changed:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._changed.wait_for(condition, remaining):
                raise TimeoutError("the time limit of the call is over")

    async def wait_async(self, condition: Callable[[], bool]) -> None:
        """As `wait`, from any event loop; a wait that is cancelled takes nothing away."""
        loop = asyncio.get_running_loop()
        changed = asyncio.Event()

        def wake() -> None:
            # A loop that has been closed has nobody left who waits.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(changed.set)

        self.add_listener(wake)
        try:
            while not condition():
                await changed.wait()
                changed.clear()
        finally:
            with self._changed:
                self._listeners.remove(wake)

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Have `listener` called after each item from now on, in the I/O thread."""
        with self._changed:
            self._listeners.append(listener)


class GenerationResult:
    def __init__(
        self,
        request: GenerationRequest,
        state: SequenceState,
        mailbox: ResultMailbox,
        abort: Callable[[], None],
    ) -> None:
        self.request = request
        self._state = state
        self._mailbox = mailbox
        self._abort = abort
        self._lock = threading.Lock()
        self._error: CarouselError | None = None
        self._last_delta = Delta("", [], [])
        self._num_chars_taken = 0
        self._num_tokens_taken = 0
        self._end_taken = False

    @property
    def streaming(self) -> bool:
        return self.request.streaming

    @property
    def done(self) -> bool:
        """The end has been received, whether or not anybody has asked for it. Never false again."""
        return self._mailbox.ended

    @property
    def outputs(self) -> list[CompletionOutput]:
        """All that has been received so far, finished or not; takes nothing away from an iteration."""
        with self._lock:
            self._fold()
            return [self._output()]

    def result(self, timeout: float | None = None) -> CompletionOutput:
        """Wait for the end. May be called again, and from several threads; each time it gives the same.

        `timeout` is in seconds and holds for the whole wait; the request goes on when it is over.
        Raises: TimeoutError, or what ended the request: RequestError, RingClosed.
        """
        self._mailbox.wait(lambda: self.done, deadline_after(timeout, time.monotonic()))
        return self._final_output()

    async def aresult(self, timeout: float | None = None) -> CompletionOutput:
        """As `result`. Cancelling the task that waits leaves request and result as they are."""
        try:
            async with asyncio.timeout_at(deadline_after(timeout, asyncio.get_running_loop().time())):
                await self._mailbox.wait_async(lambda: self.done)
        except TimeoutError:
            raise TimeoutError("the time limit of the call is over") from None
        return self._final_output()

    def abort(self) -> None:
        """Ask for an early end; what there is still comes, with finish_reason "abort". Idempotent."""
        self._abort()

    async def aclose(self) -> None:
        """Abort, as one closes an iteration that was left early."""
        self._abort()

    def __iter__(self) -> Iterator[CompletionOutput]:
        """Outputs as they come, the finished one last. What has come meanwhile comes as one output; several
        iterations of one result share them out. Leaving early leaves the request running.

        Raises: RuntimeError unless the request is streaming; otherwise what `result` does.
        """
        return self

    def __next__(self) -> CompletionOutput:
        self._check_streaming()
        while True:
            seen = self._mailbox.num_put
            output = self.take_output()
            if output is not None:
                return output
            if self._end_taken:
                raise StopIteration
            self._mailbox.wait(self._has_more_than(seen), None)

    def __aiter__(self) -> AsyncIterator[CompletionOutput]:
        return self

    async def __anext__(self) -> CompletionOutput:
        self._check_streaming()
        while True:
            seen = self._mailbox.num_put
            output = self.take_output()
            if output is not None:
                return output
            if self._end_taken:
                raise StopAsyncIteration
            await self._mailbox.wait_async(self._has_more_than(seen))

    def take_output(self) -> CompletionOutput | None:
        """What is new since the last call, without waiting; None when nothing is. The end comes once, as an
        output or as the error it raises, and it comes last.
        """
        with self._lock:
            self._fold()
            if self._end_taken:
                return None
            has_news = len(self._state.token_ids) > self._num_tokens_taken
            has_news = has_news or len(self._state.text) > self._num_chars_taken
            if self._error is not None and not has_news:
                self._end_taken = True
                raise self._error.with_traceback(None)
            if not has_news and self._last_delta.finish_reason is None:
                return None
            output = self._output()
            self._num_chars_taken = len(output.text)
            self._num_tokens_taken = len(output.token_ids)
            self._end_taken = output.finish_reason is not None
            return output

    def on_change(self, listener: Callable[[], None]) -> None:
        """Have `listener` called when something has come, in the I/O thread; once now if it already has."""
        self._mailbox.add_listener(listener)
        if self._mailbox.num_put:
            listener()

    def _has_more_than(self, num_seen: int) -> Callable[[], bool]:
        return lambda: self._mailbox.num_put > num_seen

    def _check_streaming(self) -> None:
        if not self.streaming:
            raise RuntimeError("the request is not streaming: wait for it with result() or aresult()")

    def _final_output(self) -> CompletionOutput:
        with self._lock:
            self._fold()
            if self._error is not None:
                raise self._error.with_traceback(None)
            return self._output()

    def _fold(self) -> None:
        """Take what has come into the state. An error that ends the request is kept, not raised."""
        outputs: list[SequenceOutput] = []
        for item in self._mailbox.take():
            if isinstance(item, CarouselError):
                self._error = item
            else:
                assert isinstance(item, SequenceOutput)
                outputs.append(item)
        if outputs:
            try:
                self._last_delta = self._state.receive(outputs)
            except RequestError as error:
                self._error = error

    def _output(self) -> CompletionOutput:
        state, last = self._state, self._last_delta
        return CompletionOutput(
            index=0,
            text=state.text,
            token_ids=list(state.token_ids),
            text_diff=state.text[self._num_chars_taken :],
            token_ids_diff=state.token_ids[self._num_tokens_taken :],
            logprobs=list(state.logprobs),
            finish_reason=last.finish_reason,
            stop_reason=last.matched_stop,
            cumulative_logprob=None if state.finish is None else state.finish.cumulative_logprob,
            usage=last.usage,
        )
