"""AsyncClient: generate from a runtime that is already running, from asyncio. One event loop owns it.

An OutputBatch crosses from the I/O thread into the loop as a whole: one wake-up per step, however many
sequences it has.
"""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TypeAlias, Unpack

from carousel.client.connection.connection import RING_TIMEOUT_S
from carousel.client.connection.discovery import find_target
from carousel.client.core.control import ControlArguments, check_mode, check_num_steps
from carousel.client.core.embedding import Embedding, embedding_of, embedding_params
from carousel.client.core.labels import LabelBook
from carousel.client.core.mailbox import WAKES_PER_TURN, Mailbox, call_in_loop
from carousel.client.core.request_builder import EmbedOptions, Prompt, RequestOptions, Submission, TokenIds
from carousel.client.core.request_state import RequestState, num_logprob_bytes
from carousel.client.core.result import Completion, Delta
from carousel.client.core.session import Session, control_result, deadline_after
from carousel.client.core.stats import AsyncStatsStream, R, StatsOp, StatsPlace
from carousel.client.sync import CONNECT_TIMEOUT_S, CONTROL_TIMEOUT_S
from runtime.base.errors import CarouselError, RequestAborted, RingClosed
from runtime.base.paced_line import PacedLine
from runtime.ring.tenants import OWNER
from runtime.wire.messages import ControlOp, PauseMode
from runtime.wire.sampling_params import SamplingParams
from runtime.wire.stats import IterationStats, RequestStatsPerIteration

THREAD_LOGPROB_BYTES = 32 << 10
"""Size of 8,192 log-probabilities, which take 5 ms to unpack; more than that is done in a thread."""
Connect: TypeAlias = Callable[[], Awaitable["Session[Mailbox]"]]


class AsyncResultStream:
    """Async iterator over the deltas of all sequences of one request: of each what is new, as it comes. The
    request is made when the iteration begins.

    Cancelling the task that waits for it aborts the request. So does dropping it, which is what `break` does
    to one that only the `async for` knows; hold one that has a name in `async with`, or call `aclose`.
    """

    def __init__(self, connect: Connect, submission: Submission, timeout: float | None) -> None:
        self.state: RequestState | None = None
        """All that has been received so far; None before the iteration has begun."""
        self._connect = connect
        self._submission = submission
        self._timeout = timeout
        self._deadline: float | None = None
        self._session: Session[Mailbox] | None = None
        self._mailbox: Mailbox | None = None
        self._deltas: deque[Delta] = deque()
        self._is_awaited = False
        self._closed = False

    @property
    def has_news(self) -> bool:
        """The next delta is there: taking it does not wait."""
        return bool(self._deltas)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while self._closed or not self._deltas:
            if self._closed or (self.state is not None and self.state.is_complete):
                raise StopAsyncIteration
            if self._is_awaited:
                raise RuntimeError("another task is already waiting for this stream")
            await self._receive()
        return self._deltas.popleft()

    async def _receive(self) -> None:
        """Wait for news and take them in."""
        self._is_awaited = True
        if self._mailbox is None:
            self._deadline = deadline_after(self._timeout, asyncio.get_running_loop().time())
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
            session = await self._connect()
            if self._closed:
                raise RequestAborted("the stream was closed before its request was made")
            self._session = session
            self.state, self._mailbox = session.open_request(self._submission)
        if self.state.error is None:
            items = await self._mailbox.take_async()
            # Unpacking many log-probabilities takes long: nobody else of this event loop waits for it.
            is_much = num_logprob_bytes(items) > THREAD_LOGPROB_BYTES
            receive = self.state.receive
            self._deltas.extend(await asyncio.to_thread(receive, items) if is_much else receive(items))
        if self._closed or not self._deltas:
            self.state.check()

    async def completion(self) -> Completion:
        """Wait for the end and return the whole. Raises: as the iteration."""
        async with self:
            async for _ in self:
                pass
            assert self.state is not None
            return self.state.completion()

    async def aclose(self) -> None:
        """Abort unless finished; a task that waits for the next delta gets RequestAborted. Idempotent."""
        self._abandon()

    def abort(self) -> None:
        """Ask for an early end; what there is still comes, with finish_reason "abort"."""
        if self._session is None or self.state is None:
            self._closed = True
        else:
            self._session.abort(self.state.number)

    def _abandon(self) -> None:
        self._closed = True
        if self._session is not None and self.state is not None:
            self._session.forget(self.state.number)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._abandon()

    def __del__(self) -> None:
        self._abandon()


@dataclass(slots=True)
class _Link:
    """The one connection of a client in all tenants' names."""

    session: Session[Mailbox] | None = None
    loop: asyncio.AbstractEventLoop | None = None
    labels: LabelBook = field(default_factory=LabelBook)


class AsyncClient:
    def __init__(
        self,
        run_dir: str | Path | None = None,
        *,
        curve_dir: str | Path | None = None,
        connect_timeout: float = CONNECT_TIMEOUT_S,
        ring_timeout: float = RING_TIMEOUT_S,
    ) -> None:
        """Name the runtime, as for Client; by default the one that CAROUSEL_RUN_DIR names, else the only one
        alive.

        Nothing is connected before `connect`, `async with`, or the first call.
        Raises: RingClosed when no runtime is alive, ConfigError when there are several or a key is wrong.
        """
        self._target = find_target(run_dir, curve_dir)
        self._connect_timeout_s = connect_timeout
        self._ring_timeout_s = ring_timeout
        self._link = _Link()
        self._tenant = OWNER

    def of_tenant(self, tenant: str) -> AsyncClient:
        """Return this client as it asks in the name of a tenant, for a server that knows its callers. Both
        have one connection. Believed of who can open the run directory; over TCP the client's key counts.
        """
        other = copy.copy(self)
        other._tenant = tenant
        return other

    @property
    def _session(self) -> Session[Mailbox] | None:
        return self._link.session

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

    @property
    def labels(self) -> LabelBook:
        """Labels of the requests in flight, of all tenants."""
        return self._link.labels

    @property
    def num_in_flight(self) -> int:
        """Sequences of this client that have not ended."""
        return 0 if self._session is None else self._session.num_in_flight

    @property
    def max_in_flight(self) -> int:
        """How many sequences the server lets one caller have waiting without refusing any; 1 before it is
        connected.
        """
        return 1 if self._session is None else self._session.max_in_flight()

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
        return await self.submit(prompt, sampling_params, timeout=timeout, **options).completion()

    def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncResultStream:
        """Begin a request whose output comes at its end: `await client.submit(...).completion()` is
        `generate`, and in between it can be aborted.
        """
        sampling = SamplingParams() if sampling_params is None else sampling_params
        return self.open(Submission(prompt, sampling, False, options), timeout)

    async def embed(
        self,
        prompt: str | TokenIds,
        *,
        truncate_prompt_tokens: int | None = None,
        timeout: float | None = None,
        **options: Unpack[EmbedOptions],
    ) -> Embedding:
        """The vector of one text, or of token ids, from a server of --task embed. Cancelling aborts it.

        `truncate_prompt_tokens` as in SamplingParams; `timeout` is in seconds. Raises: as `generate`.
        """
        sampling = embedding_params(truncate_prompt_tokens)
        completion = await self.generate(prompt, sampling, timeout=timeout, task="embed", **options)
        return embedding_of(completion)

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
        sampling = SamplingParams() if sampling_params is None else sampling_params
        return self.open(Submission(prompt, sampling, True, options), timeout)

    def open(self, submission: Submission, timeout: float | None = None) -> AsyncResultStream:
        """Begin a request that is written down already, as `stream` and `submit` do with their arguments."""
        return AsyncResultStream(self._opened, replace(submission, tenant=self._tenant), timeout)

    async def _opened(self) -> Session[Mailbox]:
        """The session, connected."""
        loop, link = asyncio.get_running_loop(), self._link
        if link.session is None:
            link.loop, line = loop, PacedLine(WAKES_PER_TURN)
            link.session = Session(
                self._target,
                lambda: Mailbox(line),
                lambda function, argument: call_in_loop(loop, function, argument),
                connect_timeout_s=self._connect_timeout_s,
                ring_timeout_s=self._ring_timeout_s,
                labels=link.labels,
            )
        if loop is not link.loop:
            raise RuntimeError("an AsyncClient belongs to the event loop that it was first used in")
        opened = link.session.connection.opened
        if not opened.done():
            await asyncio.shield(asyncio.wrap_future(opened))
        opened.result()
        return link.session

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

    async def iteration_stats(
        self, after: int = 0, *, timeout: float = CONTROL_TIMEOUT_S
    ) -> list[IterationStats]:
        """Statistics of the iterations after number `after` that the scheduler still keeps, the oldest first.

        Raises: RequestError (stats_off when it keeps none), RingClosed, TimeoutError.
        """
        return await self._read_stats(StatsPlace.of_iterations(after), timeout)

    async def request_stats(
        self, after: int = 0, *, timeout: float = CONTROL_TIMEOUT_S
    ) -> list[RequestStatsPerIteration]:
        """As `iteration_stats`, of each live request. Kept with `request_stats_max_iterations` only."""
        return await self._read_stats(StatsPlace.of_requests(after), timeout)

    def watch_stats(self, *, timeout: float | None = None) -> AsyncStatsStream:
        """The statistics of each iteration as it ends: `async for stats in client.watch_stats()`. It ends
        when none has come for `timeout` seconds. Raises: as `iteration_stats`, from the iteration.
        """

        async def ask(after: int, timeout: float | None) -> Any:
            return await self._ask_stats("iteration_stats", after, timeout, wait=True)

        return AsyncStatsStream(ask, timeout)

    async def _read_stats(self, place: StatsPlace[R], timeout: float) -> list[R]:
        records: list[R] = []
        while not place.is_at_end:
            records += place.take(await self._ask_stats(place.op, place.after, timeout))
        return records

    async def _ask_stats(self, op: StatsOp, after: int, timeout: float | None, *, wait: bool = False) -> Any:
        session = await self._opened()
        return await _answer(session.asking_stats(op, after, wait=wait, tenant=self._tenant), timeout)

    async def pause_generation(
        self, mode: PauseMode = "in_place", *, timeout: float = CONTROL_TIMEOUT_S
    ) -> dict[str, Any]:
        """Launch no more steps until `continue_generation`; what comes meanwhile waits, and nothing is lost.
        Deadlines pass. `mode` says what becomes of those that run: "in_place" they keep what they have;
        "retract" they give their pages up, so that the whole cache can be flushed; "abort" they end, and so
        does what waits.

        Returns: is_paused, num_running, num_waiting. Raises RequestError, RingClosed, TimeoutError.
        """
        paused: dict[str, Any] = await self._control("pause_generation", timeout, mode=check_mode(mode))
        return paused

    async def continue_generation(self, *, timeout: float = CONTROL_TIMEOUT_S) -> dict[str, Any]:
        """Go on after `pause_generation`; without effect otherwise. Returns and raises as it does."""
        answer: dict[str, Any] = await self._control("continue_generation", timeout)
        return answer

    async def start_profile(
        self, num_steps: int | None = None, *, timeout: float = CONTROL_TIMEOUT_S
    ) -> dict[str, Any]:
        """Record what scheduler and worker do in the next `num_steps` steps (default: until `stop_profile`,
        10,000 at most) as a Chrome trace, which ui.perfetto.dev shows.

        Returns: name of the file, written at the end to the launch's `profile_dir`, and num_steps.
        Raises: RequestError (409 while one is taken), RingClosed, TimeoutError.
        """
        num_steps = check_num_steps(num_steps)
        begun: dict[str, Any] = await self._control("start_profile", timeout, num_steps=num_steps)
        return begun

    async def stop_profile(self, *, timeout: float = CONTROL_TIMEOUT_S) -> dict[str, Any]:
        """End the profile: name of the file and num_steps that are in it. Raises: as `start_profile`."""
        ended: dict[str, Any] = await self._control("stop_profile", timeout)
        return ended

    async def _control(self, op: ControlOp, timeout: float, **about: Unpack[ControlArguments]) -> Any:
        session = await self._opened()
        return await _answer(session.asking(op, tenant=self._tenant, **about), timeout)

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


async def _answer(asking: AbstractContextManager[Mailbox], timeout: float | None) -> Any:
    """The body of the one reply. Raises the error it carries, TimeoutError after `timeout` seconds."""
    async with asyncio.timeout_at(deadline_after(timeout, asyncio.get_running_loop().time())):
        with asking as mailbox:
            return control_result((await mailbox.take_async())[0])
