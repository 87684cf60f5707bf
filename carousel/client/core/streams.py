"""Deltas of one request as they arrive: ResultStream for a thread, AsyncResultStream for an event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Self, TypeAlias

from carousel.client.core.logprobs import packed_logprobs
from carousel.client.core.mailbox import Mailbox, deadline_after
from carousel.client.core.puts import put, put_async
from carousel.client.core.request.submission import Submission
from carousel.client.core.result import Completion, Delta
from carousel.client.core.session import Session
from carousel.client.core.state.request_state import RequestState
from runtime.base.errors import InvalidRequest, RequestAborted

Connect: TypeAlias = Callable[[], Awaitable[Session[Mailbox]]]


class _Stream:
    """A request whose output is read as it arrives; base class."""

    state: RequestState | None

    def __init__(self) -> None:
        self._session: Session[Mailbox] | None = None
        self._deltas: deque[Delta] = deque()
        self._closed = False

    def _whole(self) -> Completion:
        """Return the completion once there are no more deltas. Raises the error with which the request has
        failed, or RequestAborted if it was left before its end.
        """
        if self.state is not None:
            self.state.check()
        if self.state is None or not self.state.ended:
            raise RequestAborted("the stream was closed before its end")
        return self.state.completion()

    @property
    def num_logprob_bytes(self) -> int:
        """Number of bytes of logprobs that are kept, of those that have been read and those that have not."""
        state = self.state
        return 0 if state is None else sum(each.num_logprob_bytes for each in state.sequences)

    def done_with_logprobs(self, delta: Delta) -> Callable[[], None]:
        """Return a function by which the reader says that it keeps a delta's logprobs no longer. Until then
        they count. The function does not keep the delta.
        """
        assert self.state is not None
        num_prompt = len(delta.prompt_logprobs) - packed_logprobs(delta.prompt_logprobs).num_none
        return partial(self.state.sequences[delta.index].forget_logprobs, len(delta.logprobs), num_prompt)

    def _abandon(self) -> None:
        self._closed = True
        if self._session is not None and self.state is not None:
            self._session.forget(self.state.number)
            if self.state.span is not None:
                self.state.end_span(RequestAborted("the stream was closed before its end"))

    def __del__(self) -> None:
        self._abandon()


def check_stream(given: object, kind: type[_Stream]) -> None:
    """Check that an argument is a stream of this kind. Raises InvalidRequest."""
    if not isinstance(given, kind):
        raise InvalidRequest(
            f"stream: a {kind.__name__} as `stream` returns it, got {type(given).__name__}; a call of "
            "generate is bounded by time_limit",
            param="stream",
        )


class ResultStream(_Stream):
    """Iterator over the deltas of all sequences of one request, for one thread. Leaving it early aborts the
    request. A thread that waits while another one calls `close` gets RequestAborted.
    """

    def __init__(self, session: Session[Mailbox], submission: Submission, deadline: float | None) -> None:
        """Submit a request. Raises what Session.submit does."""
        super().__init__()
        self.state: RequestState
        """Everything that was received so far."""
        put(session, submission, deadline)
        self.state, self._mailbox = session.open_request(submission)
        self._session = session
        self._deadline = deadline

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        while self._closed or not self._deltas:
            if self._closed or self.state.is_complete:
                raise StopIteration
            try:
                if self.state.error is None:
                    self._deltas.extend(self.state.receive(self._mailbox.take(self._deadline)))
                if self._closed or not self._deltas:
                    self.state.check()
            except BaseException:
                self.close()
                raise
        return self._deltas.popleft()

    def completion(self) -> Completion:
        """Wait for the end and return the whole result. Raises the same errors as the iteration."""
        for _ in self:
            pass
        return self._whole()

    def close(self) -> None:
        """Abort the request unless it has finished. May be called again."""
        self._abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncResultStream(_Stream):
    """Async iterator over the deltas of all sequences of one request, which is submitted when the iteration
    begins.

    Cancelling the task that waits for it aborts the request. So does dropping the iterator, as `break` does
    if only the `async for` refers to it. If it has a name, use it in `async with`, or call `aclose`.
    """

    def __init__(self, connect: Connect, submission: Submission, timeout: float | None) -> None:
        super().__init__()
        self.state: RequestState | None = None
        """Everything that was received so far; None before the iteration has begun."""
        self._connect = connect
        self._submission: Submission | None = submission
        """The request until it is submitted. Its state keeps all that is needed from then on."""
        self._timeout = timeout
        self._deadline: float | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._mailbox: Mailbox | None = None
        self._is_awaited = False
        self.keeps_logprobs = True
        """Set to False before the iteration by a reader who forgets the logprobs of each delta, so that they
        are kept once. The completion has none then.
        """

    @property
    def num_kept_bytes(self) -> int:
        """Number of bytes that are kept: of logprobs, and of output that has come and was not received."""
        if self.state is None or self._mailbox is None:
            return 0
        num_unread = sum(max(0, each.num_noted_chars - each.num_chars) for each in self.state.sequences)
        return self._mailbox.num_bytes + num_unread + self.num_logprob_bytes

    @property
    def has_news(self) -> bool:
        """Return True if the next delta is there, so that taking it does not wait."""
        return bool(self._deltas)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while self._closed or not self._deltas:
            # Written out instead of calling a property, because this runs for every token.
            if self._closed or (self.state is not None and self.state.is_complete):
                raise StopAsyncIteration
            if self._is_awaited:
                raise RuntimeError("another task is already waiting for this stream")
            await self._receive()
        return self._deltas.popleft()

    async def _receive(self) -> None:
        """Wait for output and receive it."""
        self._is_awaited = True
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._deadline = deadline_after(self._timeout, self._loop.time())
        try:
            if self._deadline is None:
                await self._take_in()
            else:
                async with asyncio.timeout_at(self._deadline):
                    await self._take_in()
        except TimeoutError:
            self._abandon()
            raise TimeoutError("the time limit of the call is over") from None
        except BaseException:
            self._abandon()
            raise
        finally:
            self._is_awaited = False

    async def _take_in(self) -> None:
        if self._mailbox is None or self.state is None:
            session, submission = await self._connect(), self._submission
            self._check_open()
            assert submission is not None
            await put_async(session, submission)
            self._check_open()
            self._session = session
            self.state, self._mailbox = session.open_request(submission)
            self._submission = submission = None
            for sequence in self.state.sequences:
                sequence.keeps_logprobs = self.keeps_logprobs
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("a stream belongs to the event loop in which its iteration began")
        if self.state.error is None:
            items = await self._mailbox.take_async()
            self._deltas.extend(self.state.receive(items))
        if self._closed or not self._deltas:
            self.state.check()

    def _check_open(self) -> None:
        if self._closed:
            raise RequestAborted("the stream was closed before its request was made")

    async def completion(self) -> Completion:
        """Wait for the end and return the whole result. Raises the same errors as the iteration."""
        async with self:
            async for _ in self:
                pass
            return self._whole()

    async def aclose(self) -> None:
        """Abort the request unless it has finished. A task that waits for the next delta gets RequestAborted.
        May be called again.
        """
        self._abandon()

    def abort(self) -> None:
        """Ask for an early end. The output so far still arrives, with finish_reason "abort"."""
        if self._session is None or self.state is None:
            self._closed = True
        else:
            self._session.abort(self.state.number)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._abandon()
