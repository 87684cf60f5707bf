"""AsyncClient: generate from a runtime that is already running, from asyncio. One event loop owns it.

An OutputBatch crosses from the I/O thread into the loop as a whole: one wake-up per step, however many
sequences it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self, TypeAlias, Unpack

from client.client import CONNECT_TIMEOUT_S, CONTROL_TIMEOUT_S
from client.discovery import find_run_dir
from client.request_builder import Prompt, RequestOptions
from client.result import Completion, Delta, SequenceState
from client.session import ControlOp, Item, Session, control_result, deadline_after, outputs_of
from runtime.errors import CarouselError, RingClosed
from runtime.sampling_params import SamplingParams

OpenSequence: TypeAlias = Callable[[], Awaitable["tuple[Session[LoopMailbox], SequenceState, LoopMailbox]"]]


class LoopMailbox:
    """A waiter's list, filled and emptied in the event loop."""

    __slots__ = ("_items", "_loop", "_waiter")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: list[Item] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Item) -> None:
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[Item]:
        """Everything that is there, at least one item."""
        if not self._items:
            self._waiter = self._loop.create_future()
            await self._waiter
        items = self._items
        self._items = []
        return items


class AsyncResultStream:
    """Async iterator over the deltas of one sequence; the request is made when the iteration begins.

    Cancelling the task that waits for it aborts the request. So does dropping it, which is what `break` does
    to one that only the `async for` knows; hold one that has a name in `async with`, or call `aclose`.
    """

    def __init__(self, open_sequence: OpenSequence, timeout: float | None) -> None:
        self.state: SequenceState | None = None
        """All that has been received so far; None before the iteration has begun."""
        self._open_sequence = open_sequence
        self._timeout = timeout
        self._deadline: float | None = None
        self._session: Session[LoopMailbox] | None = None
        self._mailbox: LoopMailbox | None = None
        self._is_awaited = False
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        if self._ended:
            raise StopAsyncIteration
        if self._is_awaited:
            raise RuntimeError("another task is already waiting for this stream")
        self._is_awaited = True
        if self._mailbox is None:
            self._deadline = deadline_after(self._timeout, asyncio.get_running_loop().time())
        try:
            async with asyncio.timeout_at(self._deadline):
                delta = await self._next()
        except TimeoutError:
            self._abandon()
            raise TimeoutError("the time limit of the call is over") from None
        except BaseException:
            self._abandon()
            raise
        finally:
            self._is_awaited = False
        self._ended = delta.finish_reason is not None
        return delta

    async def _next(self) -> Delta:
        if self._mailbox is None or self.state is None:
            self._session, self.state, self._mailbox = await self._open_sequence()
        return self.state.receive(outputs_of(await self._mailbox.take()))

    async def aclose(self) -> None:
        """Abort unless finished; a task that waits for the next delta gets RequestAborted. Idempotent."""
        self._abandon()

    def abort(self) -> None:
        """Ask for an early end; what there is still comes, with finish_reason "abort"."""
        if self._session is None or self.state is None:
            self._ended = True
        else:
            self._session.abort(self.state.request.handle)

    def _abandon(self) -> None:
        self._ended = True
        if self._session is not None and self.state is not None:
            self._session.forget(self.state.request.handle)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._abandon()

    def __del__(self) -> None:
        self._abandon()


class AsyncClient:
    def __init__(
        self, run_dir: str | Path | None = None, *, connect_timeout: float = CONNECT_TIMEOUT_S
    ) -> None:
        """Name the runtime; by default the one that CAROUSEL_RUN_DIR names, else the only one alive.

        Nothing is connected before `connect`, `async with`, or the first call.
        Raises: RingClosed when no runtime is alive, ConfigError when there are several.
        """
        self._run_dir = find_run_dir(run_dir)
        self._connect_timeout_s = connect_timeout
        self._session: Session[LoopMailbox] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def connect(self) -> None:
        """Connect now. Raises ProtocolMismatch, or RingClosed when the runtime does not answer."""
        await self._opened()

    @property
    def is_connected(self) -> bool:
        """The server has answered and the connection has not ended since."""
        connection = None if self._session is None else self._session.connection
        return connection is not None and connection.opened.done() and connection.error is None

    @property
    def error(self) -> CarouselError | None:
        """Why the connection has ended; None while it has not."""
        return None if self._session is None else self._session.connection.error

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion:
        """Generate from one prompt: text, token ids, or chat messages. Cancelling aborts the request.

        `timeout` is in seconds. Raises: RequestError (InvalidRequest, Overloaded ...), RingClosed,
        TimeoutError.
        """
        async with self._stream(prompt, sampling_params, False, timeout, options) as stream:
            async for _ in stream:
                pass
            assert stream.state is not None
            return stream.state.completion()

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncResultStream:
        """Generate from one prompt: `async for delta in client.stream(...)`. The first step submits it.

        Raises: as `generate`, from the iteration.
        """
        return self._stream(prompt, sampling_params, True, timeout, options)

    def _stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None,
        stream: bool,
        timeout: float | None,
        options: RequestOptions,
    ) -> AsyncResultStream:
        async def open_sequence() -> tuple[Session[LoopMailbox], SequenceState, LoopMailbox]:
            session = await self._opened()
            return session, *session.open_sequence(prompt, sampling, stream=stream, **options)

        return AsyncResultStream(open_sequence, timeout)

    async def _opened(self) -> Session[LoopMailbox]:
        """The session, connected."""
        loop = asyncio.get_running_loop()
        if self._session is None:
            self._loop = loop
            self._session = Session(
                self._run_dir,
                lambda: LoopMailbox(loop),
                lambda function, argument: _call_in_loop(loop, function, argument),
                connect_timeout_s=self._connect_timeout_s,
            )
        if loop is not self._loop:
            raise RuntimeError("an AsyncClient belongs to the event loop that it was first used in")
        opened = self._session.connection.opened
        if not opened.done():
            await asyncio.shield(asyncio.wrap_future(opened))
        opened.result()
        return self._session

    def abort(self, stream: AsyncResultStream) -> None:
        """End a request early; its iterator still delivers what there is, with finish_reason "abort"."""
        stream.abort()

    async def server_info(self, *, timeout: float = CONTROL_TIMEOUT_S) -> dict[str, Any]:
        """What the scheduler says of itself. Raises RequestError, RingClosed, TimeoutError."""
        info: dict[str, Any] = await self._control("server_info", timeout)
        return info

    async def flush_cache(self, *, timeout: float = CONTROL_TIMEOUT_S) -> Any:
        """Forget all cached prefixes that no request uses. Raises RequestError, RingClosed, TimeoutError."""
        return await self._control("flush_cache", timeout)

    async def _control(self, op: ControlOp, timeout: float) -> Any:
        session = await self._opened()
        async with asyncio.timeout_at(deadline_after(timeout, asyncio.get_running_loop().time())):
            items = await session.open_control(op).take()
        return control_result(items[0])

    async def aclose(self, error: CarouselError | None = None) -> None:
        """Abort what is in flight and disconnect; who waits gets `error`, or RingClosed. Idempotent."""
        if self._session is not None:
            error = error or RingClosed("the client was closed")
            self._session.end_all(error)
            await asyncio.to_thread(self._session.connection.close)
            self._session.fail_all(error)

    async def __aenter__(self) -> Self:
        await self._opened()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _call_in_loop(loop: asyncio.AbstractEventLoop, function: Callable[[Any], None], argument: Any) -> None:
    try:
        loop.call_soon_threadsafe(function, argument)
    except RuntimeError:
        if not loop.is_closed():
            raise
        # With the loop everybody has gone who could wait for this.
