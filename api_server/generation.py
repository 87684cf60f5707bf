"""Generation: runs one HTTP request's sequences and writes them out, as one JSON body or as events.

The response begins with the first thing that comes back, so what is refused is an HTTP error; a failure after
that is an event. As soon as the HTTP client has gone, whatever its request is doing is aborted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from api_server.errors import as_request_error, error_body, respelled
from api_server.metrics import SequenceTimer
from api_server.openai_types import PromptTokensDetails, UsageBody
from api_server.server_state import ServerState
from api_server.sse import EventWriter
from client.async_client import AsyncResultStream
from client.request_builder import Prompt, RequestOptions
from client.result import Completion, Delta
from runtime.errors import RequestError
from runtime.messages import Usage
from runtime.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Job:
    """What a checked body asks for: one choice for each prompt."""

    prompts: Sequence[Prompt]
    sampling: SamplingParams
    options: RequestOptions
    stream: bool
    param_names: Mapping[str, str] = field(default_factory=dict)
    """The body's names of what the client library calls otherwise, for errors."""


class Format(Protocol):
    """How one endpoint spells its answers."""

    def events(self, index: int, delta: Delta) -> list[msgspec.Struct]:
        """The events of a choice's delta; none where there is nothing to tell."""

    def last_events(self, usages: Sequence[Usage]) -> list[msgspec.Struct]:
        """The events after all choices have ended."""

    def response(self, completions: Sequence[Completion]) -> msgspec.Struct | list[msgspec.Struct]:
        """The body of an answer that is not streamed."""


class Generation(Response):
    """The ASGI response of a generating endpoint."""

    def __init__(self, server: ServerState, job: Job, answer: Format) -> None:
        super().__init__()
        self._server = server
        self._client = server.client
        self._job = job
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises RequestError and RingClosed only while nothing has been sent."""
        if self._job.stream:
            writer = EventWriter(
                send,
                scope["state"]["abort_connection"],
                slow_reader_timeout_s=self._server.config.slow_reader_timeout,
            )
            work = self._stream(writer)
        else:
            work = self._complete(scope, receive, send)
        try:
            await _run_until_disconnect(receive, work)
        except RequestError as error:
            raise respelled(error, self._job.param_names) from None

    async def _complete(self, scope: Scope, receive: Receive, send: Send) -> None:
        job = self._job
        try:
            async with asyncio.TaskGroup() as group:
                calls = [group.create_task(self._generate(prompt)) for prompt in job.prompts]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        body = msgspec.json.encode(self._answer.response([call.result() for call in calls]))
        await Response(body, media_type="application/json")(scope, receive, send)

    async def _generate(self, prompt: Prompt) -> Completion:
        with SequenceTimer(self._server.metrics) as timer:
            completion = await self._client.generate(prompt, self._job.sampling, **self._job.options)
            if completion.finish_reason == "abort":
                raise _aborted()
            timer.note_finished(completion.usage)
            return completion

    async def _stream(self, writer: EventWriter) -> None:
        job = self._job
        streams = [self._client.stream(prompt, job.sampling, **job.options) for prompt in job.prompts]
        try:
            with ExitStack() as stack:
                timers = [stack.enter_context(SequenceTimer(self._server.metrics)) for _ in streams]
                await self._write_events(writer, streams, timers)
        except Exception as error:
            if not writer.has_begun:
                raise
            await writer.write(error_body(as_request_error(error)))
        finally:
            for stream in streams:
                await stream.aclose()
        await writer.end()

    async def _write_events(
        self, writer: EventWriter, streams: Sequence[AsyncResultStream], timers: Sequence[SequenceTimer]
    ) -> None:
        encode = msgspec.json.Encoder().encode
        usages: list[Usage] = []
        async with aclosing(_merge(streams)) as deltas:
            async for index, delta in deltas:
                timers[index].note_delta(delta)
                if delta.finish_reason == "abort":
                    raise _aborted()
                await writer.write(*map(encode, self._answer.events(index, delta)))
                if delta.usage is not None:
                    usages.append(delta.usage)
        await writer.write(*map(encode, self._answer.last_events(usages)), b"[DONE]")


def usage_body(usages: Sequence[Usage]) -> UsageBody:
    """The sum over the choices of one answer."""
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    cached = sum(usage.cached_tokens for usage in usages)
    return UsageBody(prompt, completion, prompt + completion, PromptTokensDetails(cached))


def _aborted() -> RequestError:
    return RequestError("the server ended this request early", code="aborted", status=503)


async def _merge(streams: Sequence[AsyncResultStream]) -> AsyncGenerator[tuple[int, Delta]]:
    """(choice, delta) as they come. Raises the first error of any; leaving early aborts all."""
    if len(streams) == 1:
        async for delta in streams[0]:
            yield 0, delta
        return
    merged: asyncio.Queue[tuple[int, Delta] | Exception] = asyncio.Queue()

    async def pump(index: int, stream: AsyncResultStream) -> None:
        try:
            async for delta in stream:
                merged.put_nowait((index, delta))
        except Exception as error:
            merged.put_nowait(error)

    pumps = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    num_live = len(pumps)
    try:
        while num_live:
            item = await merged.get()
            if isinstance(item, Exception):
                raise item
            num_live -= item[1].finish_reason is not None
            yield item
    finally:
        for task in pumps:
            task.cancel()


async def _run_until_disconnect(receive: Receive, work: Awaitable[None]) -> None:
    """Run `work` to its end, or cancel it at the moment the HTTP client disconnects."""
    task = asyncio.ensure_future(work)
    watch = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
        await asyncio.wait((task, watch))
    if not task.cancelled():
        task.result()


async def _disconnected(receive: Receive) -> None:
    message: Any = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()
