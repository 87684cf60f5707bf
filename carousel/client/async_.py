"""AsyncClient: asyncio client for a runtime that is already running. One event loop owns it. An OutputBatch
passes from the I/O thread into the loop as a whole, with one wake-up for each step, however many sequences it
has.
"""

from __future__ import annotations

import asyncio
import copy
import weakref
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Self, Unpack

import msgspec

from carousel.client.chat_calls import AsyncChatCalls
from carousel.client.connection.connection import make_connector
from carousel.client.core.control import documented_as
from carousel.client.core.embedding import Embedding, embedding_of, embedding_params
from carousel.client.core.labels import LabelBook
from carousel.client.core.mailbox import Mailbox, Mailboxes, call_in_loop
from carousel.client.core.request.submission import EmbedOptions, Prompt, RequestOptions, Submission, TokenIds
from carousel.client.core.result import Completion
from carousel.client.core.ring_state import CONNECT_TIMEOUT_S, RING_TIMEOUT_S
from carousel.client.core.session import Session
from carousel.client.core.streams import AsyncResultStream, check_stream
from carousel.client.sync import UNUSED, Client
from runtime.base.errors import CarouselError, RingClosed
from runtime.ring.tenants import OWNER
from runtime.wire.sampling_params import SamplingParams


@dataclass(slots=True, weakref_slot=True)
class _Link:
    """The connection that a client and its per-tenant views share."""

    session: Session[Mailbox] | None = None
    loop: asyncio.AbstractEventLoop | None = None
    labels: LabelBook = field(default_factory=LabelBook)
    is_closed: bool = False
    is_opened: bool = False
    """True once the session's server has answered. A later end of the connection is in the connection's
    `error`.
    """

    @property
    def has_failed_to_connect(self) -> bool:
        """True if the server did not answer. It may be loading its model, so another attempt may succeed."""
        if self.session is None or self.is_closed:
            return False
        opened = self.session.connection.opened
        return opened.done() and opened.exception() is not None


def _why_abandoned(loop: asyncio.AbstractEventLoop, link: weakref.ref[_Link], is_idle: bool) -> str:
    if loop.is_closed():
        return "the event loop of the client was closed"
    return UNUSED if is_idle and link() is None else ""


class AsyncClient(AsyncChatCalls):
    """Client of a running runtime, whose calls are awaited. Tasks of one event loop may share one.

    Use it in an `async with` block, or end it with `aclose`. It ends by itself when its event loop is closed,
    or nothing refers to it.
    """

    def __init__(
        self,
        run_dir: str | Path | None = None,
        *,
        curve_dir: str | Path | None = None,
        connect_timeout: float = CONNECT_TIMEOUT_S,
        ring_timeout: float = RING_TIMEOUT_S,
    ) -> None:
        """Name the runtime as for Client; the default is the one that CAROUSEL_RUN_DIR names, else the only
        live one. Nothing is connected before `connect`, `async with`, or the first call. Raises RingClosed
        when no runtime is alive, ConfigError when there are several or a key is wrong.
        """
        self._make_connection = make_connector(run_dir, curve_dir, connect_timeout, ring_timeout)
        self._link = _Link()
        self._tenant = OWNER

    def of_tenant(self, tenant: str) -> AsyncClient:
        """Return a view of this client that makes requests in the name of a tenant, for a server that
        authenticates its own callers. Both share one connection. The name is only believed from clients that
        can open the run directory; over TCP the client's key decides.
        """
        if tenant == self._tenant:
            return self
        other = copy.copy(self)
        other._tenant = tenant
        return other

    @property
    def _session(self) -> Session[Mailbox] | None:
        return self._link.session

    async def connect(self) -> None:
        """Connect now. Raises ProtocolMismatch, or RingClosed when the runtime does not answer; the next call
        then tries again.
        """
        await self._opened()

    @property
    def is_connected(self) -> bool:
        """True if the server has answered and the connection has not ended since."""
        if self._session is None:
            return False
        connection = self._session.connection
        return (self._link.is_opened or connection.opened.done()) and connection.error is None

    @property
    def error(self) -> CarouselError | None:
        """Reason why the connection has ended; None while it is open."""
        return None if self._session is None else self._session.connection.error

    @property
    def labels(self) -> LabelBook:
        """Labels of the requests in flight, of all tenants."""
        return self._link.labels

    @property
    def num_in_flight(self) -> int:
        """Number of this client's sequences that have not ended."""
        return 0 if self._session is None else self._session.num_in_flight

    @property
    def max_in_flight(self) -> int:
        """Number of sequences that the server lets one caller have waiting without refusing any; 1 before it
        is connected.
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
        timeout: in seconds. Raises RequestError (InvalidRequest, Overloaded ...), RingClosed, TimeoutError.
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
        """Submit a request whose output is returned at its end. `await client.submit(...).completion()` does
        what `generate` does, but the request can be aborted in between.
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
        """Return the vector of one text, or of token ids, from a server started with --task embed. Cancelling
        aborts the request. truncate_prompt_tokens: as in SamplingParams; timeout: in seconds. Raises the same
        errors as `generate`.
        """
        sampling = embedding_params(truncate_prompt_tokens)
        return embedding_of(await self.generate(prompt, sampling, timeout=timeout, task="embed", **options))

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncResultStream:
        """Generate from one prompt: `async for delta in client.stream(...)`. The request is submitted when
        the iteration begins. Raises the same errors as `generate`, from the iteration.
        """
        sampling = SamplingParams() if sampling_params is None else sampling_params
        return self.open(Submission(prompt, sampling, True, options), timeout)

    def open(self, submission: Submission, timeout: float | None = None) -> AsyncResultStream:
        """Start a request from a prepared Submission, as `stream` and `submit` do with their arguments."""
        if submission.tenant != self._tenant:
            submission = msgspec.structs.replace(submission, tenant=self._tenant)
        return AsyncResultStream(self._opened, submission, timeout)

    async def _opened(self) -> Session[Mailbox]:
        """Return the session, connecting it first if necessary."""
        loop, link = asyncio.get_running_loop(), self._link
        if link.session is None or (not link.is_opened and link.has_failed_to_connect and loop is link.loop):
            link.loop = loop
            link.session = self._make_session(loop)
        if loop is not link.loop:
            raise RuntimeError("an AsyncClient belongs to the event loop that it was first used in")
        connection = link.session.connection
        if not link.is_opened:
            if not connection.opened.done():
                await asyncio.shield(asyncio.wrap_future(connection.opened))
            link.is_opened = connection.opened.exception() is None
        if connection.error is not None:
            raise connection.error.with_traceback(None)
        return link.session

    def _make_session(self, loop: asyncio.AbstractEventLoop) -> Session[Mailbox]:
        mailboxes = Mailboxes()
        return Session(
            self._make_connection,
            mailboxes,
            lambda function, argument: call_in_loop(loop, function, argument),
            after_wakes=mailboxes.after_wakes,
            labels=self._link.labels,
            why_abandoned=partial(_why_abandoned, loop, weakref.ref(self._link)),
        )

    @documented_as(Client.abort)
    def abort(self, stream: AsyncResultStream) -> None:
        """End a request early. Its iterator still returns the output so far, with finish_reason "abort".
        Raises InvalidRequest if `stream` is not a stream of a client.
        """
        check_stream(stream, AsyncResultStream)
        stream.abort()

    async def aclose(self, error: CarouselError | None = None) -> None:
        """Abort requests in flight and disconnect. Waiting callers get `error`, or RingClosed. May be called
        again.
        """
        if self._session is not None:
            self._link.is_closed = True
            error = error or RingClosed("the client was closed")
            self._session.end_all(error)
            await asyncio.to_thread(self._session.connection.close)
            self._session.fail_all(error)

    async def __aenter__(self) -> Self:
        await self._opened()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
