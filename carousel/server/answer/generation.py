"""Generation: runs the sequences of one HTTP request and writes them, as one JSON body or as events.

The response begins with the first result, so a refusal is an HTTP error; a later failure is an event. When
the HTTP client has gone, everything that its request is doing is aborted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from carousel.client.core.request_builder import RequestOptions, Submission
from carousel.client.core.result import Completion, Delta, aborted_completion, respelled
from carousel.client.core.streams import AsyncResultStream
from carousel.server.admin.metrics import EndReason, RequestTimer
from carousel.server.answer.departure import run_until_disconnect
from carousel.server.answer.merged_stream import merged
from carousel.server.answer.sse import EVENT_HEADERS, JSON_HEADERS, LARGE_WRITE_BYTES, AnswerWriter
from carousel.server.http.errors import as_request_error
from carousel.server.request.labels import held
from carousel.server.server_state import ServerState
from carousel.server.tenancy.auth import tenant_of
from carousel.server.tenancy.places import HeldPlaces
from carousel.server.tracing.tracing import EndedSequence, RequestTrace, TracedRequest
from runtime.base.errors import RequestError
from runtime.ring.tenants import THE_OWNER

ABORT_RETRY_S = 0.01
DELTAS_AT_ONCE = 128
"""Number of events of one step that are spelled before other tasks of the event loop run: about 2 ms."""
LARGE_DELTA = 8
"""Number of tokens with log-probabilities from which on a delta is spelled in a turn of its own. Single steps
bring fewer.
"""
PROMPTS_AT_ONCE = 8
"""Number of prompts of a request that are sent in the turn of the event loop in which it has been read."""
BYTES_OF_ENTRY = 16
"""Bytes that a character or an id of a prompt counts for when it is sent (`Entrance`)."""
MANY_CHARS = 8192
"""Number of characters and ids from which on an answer is formatted beside the event loop. So many take up
to 20 ms where they are tool calls.
"""
MANY_COPIED_CHARS = 1 << 18
"""The same for an answer whose text is not parsed. So many take 1 ms, and 4 ms with their ids."""
CHARS_OF_WORK = 64
"""Number of characters of an answer that count as one where such answers wait for each other."""
T = TypeVar("T")


class Format(Protocol):
    """Spelling of an endpoint's answers."""

    @property
    def is_parsed(self) -> bool:
        """True if the text of an answer is parsed, for calls or reasoning, and not only copied."""

    def pieces(self, completions: Sequence[Completion]) -> Iterable[bytes]:
        """Yield the body of an answer that is not streamed, in pieces. Each is made when it is asked for,
        with a few milliseconds' work. Only the first, which may be made in another thread, takes longer, and
        only it fails: later ones are made while the answer is written.
        """


class StreamFormat(Format, Protocol):
    """Format of an endpoint that can stream."""

    def events(self, prompt: int, delta: Delta) -> Iterable[bytes]:
        """Yield events for a delta of the prompt's sequences, if there is anything to send. Large ones come
        in several items. Each item is made when it is asked for, with a few milliseconds' work. An item
        without bytes is work that has no event yet.
        """

    @property
    def done(self) -> bytes:
        """Return the event that ends a stream without an error; empty for none."""

    @property
    def keeps_open(self) -> bytes:
        """Return the line, without a meaning, that keeps a connection open until there is another event."""

    def last_events(self) -> bytes:
        """Return the events after the end of all sequences, except `done`."""

    def failure_events(self, error: RequestError) -> Iterable[bytes]:
        """Yield the events that end a stream that has begun and failed, in pieces as `events`."""

    @property
    def num_kept_bytes(self) -> int:
        """Number of bytes of logprobs that it keeps, because later events have them, too."""

    @property
    def write_cost(self) -> int:
        """Cost of a byte of a large event, in bytes that are only written."""


class RoomForVectors(Protocol):
    """Room for the vectors of one request, in an HTTP process."""

    async def take(self) -> None:
        """Wait until there is room for one more."""

    def note(self, vector_bytes: int) -> None:
        """Record how many bytes a vector has."""


class Generation(Response):
    """ASGI response of a generating endpoint."""

    def __init__(
        self,
        server: ServerState,
        submissions: Sequence[Submission],
        answer: Format,
        param_names: Mapping[str, str],
        *,
        labels_are_chosen: bool = False,
    ) -> None:
        """`submissions` has one request for each prompt, alike except for prompt and label. `answer` is a
        StreamFormat if they stream. `param_names` has the body's names of parameters, for errors.
        `labels_are_chosen` is True if the caller has chosen the labels as unique names.
        """
        super().__init__()
        self._server = server
        self._client = server.client
        self._tenant = THE_OWNER
        self._num_unbegun = 0
        """Number of prompts that wait for others of the request to end."""
        self._submissions = submissions
        self._sampling = submissions[0].sampling
        self._beginning = asyncio.Lock()
        """Held while a prompt waits for its turn to be sent."""
        self._num_sequences = submissions[0].num_sequences
        """Number of sequences of each prompt, including those that best_of does not select."""
        self._param_names = param_names
        self._labels_are_chosen = labels_are_chosen
        self._answer = answer
        self._received_s = 0.0
        self._trace = RequestTrace(None)
        self._labels: Sequence[str] = ()
        """Labels of its prompts in the ring; empty until it is there."""
        self._aborted: set[int] = set()
        """Prompts whose answers were aborted."""
        self._open: dict[int, AsyncResultStream] = {}
        """Open streams by the number of the prompt."""
        self._shown: list[EndedSequence] = []
        """Sequences for the trace, once the answer has all that it needs of them."""

    def abort(self, prompts: Collection[int]) -> None:
        """End the answers to these prompts early: the caller gets the output so far. Prompts that have not
        begun get none.
        """
        for prompt in prompts:
            if prompt not in self._aborted:
                self._aborted.add(prompt)
                self._end_early(prompt)

    def _leave(self) -> None:
        """Abort because the caller has left. The time stamps of the sequences still come, with their early
        end.
        """
        self.abort(range(len(self._submissions)))

    def _end_early(self, prompt: int) -> None:
        stream = self._open.get(prompt)
        if stream is None:
            return
        if stream.state is None:
            # It is about to be submitted. If it were closed now, it would have no end to report.
            asyncio.get_running_loop().call_later(ABORT_RETRY_S, self._end_early, prompt)
        else:
            stream.abort()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request and send the answer. Raises RequestError and RingClosed only while nothing has been
        sent.
        """
        state = scope["state"]
        self._tenant = tenant_of(scope)
        self._client = self._server.client.of_tenant(self._tenant.name)
        self._received_s = state["received_s"]
        asked = TracedRequest(
            scope,
            self._submissions,
            self._received_s,
            self._server.config.model_names[0],
        )
        self._trace = self._server.begin_trace(asked)
        if self._submissions[0].stream:
            answer = cast(StreamFormat, self._answer)
            writer = self._writer(scope, send, partial(_num_kept_bytes, answer, self._open))
            work = self._stream(writer, answer)
        else:
            work = self._complete(scope, receive, send)
        failure: BaseException | None = None
        try:
            is_traced = self._trace.traceparent is not None
            await run_until_disconnect(receive, work, self._leave if is_traced else None)
        except RequestError as error:
            failure = error.with_traceback(None)  # its frames refer to it: a cycle for the collector
            raise respelled(error, self._param_names) from None
        finally:
            if self._trace.traceparent is not None:
                self._trace.end(self._shown or self._ended(), failure)
                if self._server.http_spans is not None:
                    self._server.http_spans.note(self._labels, self._received_s, time.perf_counter())
            self._open.clear()
            failure = None

    def _ended(self) -> list[EndedSequence]:
        """Return the sequences that have ended, for the request's trace, if it has one."""
        if self._trace.traceparent is None:
            return []
        has_content = self._trace.has_content
        return [
            EndedSequence(prompt, sequence.index, sequence.finish, sequence.text if has_content else "")
            for prompt, stream in self._open.items()
            if stream.state is not None
            for sequence in stream.state.sequences
            if sequence.finish is not None
        ]

    def _writer(self, scope: Scope, send: Send, num_kept_bytes: Callable[[], int]) -> AnswerWriter:
        """Return a writer of the answer, of which so many bytes are kept until it is written."""
        state, server = scope["state"], self._server
        kept = server.unread.kept(state["transport"], self._tenant.name, num_kept_bytes)
        headers = EVENT_HEADERS if self._submissions[0].stream else JSON_HEADERS
        return AnswerWriter(send, state, kept, server.entrance, headers)

    @contextmanager
    def _hold(self, prompts_at_once: int) -> Iterator[tuple[list[Submission], HeldPlaces]]:
        """Hold the request's labels and places while it runs. Both are free again when the end of the answer
        is sent, because its reader may use them at once. Raises InvalidRequest, Overloaded.
        """
        server, tenant = self._server, self._tenant
        labels = [submission.label for submission in self._submissions]
        with (
            server.places.hold(tenant, prompts_at_once * self._num_sequences) as places,
            held(self._client.labels, tenant.name, labels, are_chosen=self._labels_are_chosen) as own,
            server.running.hold(tenant.name, self, labels),
        ):
            self._labels = own
            named = [labelled(*each) for each in zip(self._submissions, own, strict=True)]
            yield [self._traced(submission) for submission in named], places

    def _traced(self, submission: Submission) -> Submission:
        traceparent = self._trace.traceparent
        if traceparent is None:
            return submission
        options = RequestOptions({**submission.options, "traceparent": traceparent})
        return replace(submission, options=options)

    async def _complete(self, scope: Scope, receive: Receive, send: Send) -> None:
        num_prompts, num_sequences = len(self._submissions), self._num_sequences
        most_at_once = self._server.places.most_at_once(self._tenant, self._client.max_in_flight)
        at_once = min(num_prompts, max(1, most_at_once // num_sequences))
        is_embedding = self._submissions[0].options.get("task") == "embed"
        with ExitStack() as stack:
            submissions, places = stack.enter_context(self._hold(at_once))
            vectors: RoomForVectors | None = None
            if is_embedding:
                vectors = stack.enter_context(self._server.vectors.held(self._tenant.name))
            room, self._num_unbegun = asyncio.Semaphore(at_once), num_prompts - at_once
            calls = [
                self._generate(number, submission, room, places, vectors)
                for number, submission in enumerate(submissions)
            ]
            completions = await all_results(calls)
        # Encoding long texts or comparing vectors takes long; other callers' tokens must not wait for it.
        is_long = is_embedding or _is_long(self._submissions[0])
        num_bytes = sum(each.num_packed_bytes for each in completions) if is_long else 0
        num_chars = _num_chars(completions)
        pieces = iter(self._answer.pieces(completions))
        make_first = partial(next, pieces, b"")
        # Of thousands that come together those in the thread's line would be kept, and nobody counts them.
        if num_chars > (MANY_CHARS if self._answer.is_parsed else MANY_COPIED_CHARS):
            work = num_chars // CHARS_OF_WORK
            first = await self._server.long_answers.run(self._tenant.name, make_first, work)
        elif is_long:
            first = await asyncio.to_thread(make_first)
        else:
            first = make_first()
        # From here on the answer has what it needs of them.
        del completions, calls
        self._shown = self._ended()
        self._open.clear()
        writer = self._writer(scope, send, lambda: num_bytes)
        last = await writer.write_pieces(first, pieces)
        if writer.has_begun:
            await writer.end(last)
        else:
            await Response(last, media_type="application/json")(scope, receive, send)

    async def _generate(
        self,
        number: int,
        submission: Submission,
        room: asyncio.Semaphore,
        places: HeldPlaces,
        vectors: RoomForVectors | None,
    ) -> Completion:
        """Answer prompt `number` when there is room for it."""
        num_sequences = self._num_sequences
        async with room:
            if vectors is not None:
                await vectors.take()
            await self._begin_prompt(number, submission)
            with RequestTimer(self._server.metrics, self._received_s, num_sequences) as timer:
                if number in self._aborted:
                    completion = aborted_completion(self._sampling.n)
                else:
                    stream = self._open[number] = self._client.open(submission)
                    completion = await stream.completion()
                    if vectors is not None and completion.embedding is not None:
                        vectors.note(completion.embedding.nbytes)
                if all(output.finish_reason != "abort" for output in completion.outputs):
                    timer.note_finished(completion.usage, self._reasons(number))
                elif number not in self._aborted:
                    raise _aborted()
                if self._num_unbegun:
                    self._num_unbegun -= 1  # the next prompt takes its places
                else:
                    places.give_back(num_sequences)
                return completion

    async def _begin_prompt(self, number: int, submission: Submission) -> None:
        """Wait until a prompt behind the first ones may be sent: two thousand in one turn of the event loop
        take 30 ms, and more if they are long. Other requests of the tenant wait for one of them at most.
        """
        if number >= PROMPTS_AT_ONCE:
            async with self._beginning:
                await self._server.entrance.enter(BYTES_OF_ENTRY * len(submission.prompt), self._tenant.name)

    def _reasons(self, prompt: int) -> list[EndReason]:
        """Return how each sequence of a prompt has ended, including those that best_of has not selected."""
        state = self._open[prompt].state
        assert state is not None
        return [sequence.finish_reason or "error" for sequence in state.sequences]

    async def _stream(self, writer: AnswerWriter, answer: StreamFormat) -> None:
        try:
            with self._hold(len(self._submissions)) as (submissions, places):
                await self._write_events(writer, answer, submissions, places)
            last = answer.last_events() + answer.done
        except Exception as error:
            if not writer.has_begun:
                raise
            failure = as_request_error(error)
            error.__traceback__ = None  # its frames refer to it: a cycle for the collector
            last = await writer.write_pieces(b"", answer.failure_events(failure))
        await writer.end(last)

    async def _write_events(
        self,
        writer: AnswerWriter,
        answer: StreamFormat,
        submissions: Sequence[Submission],
        places: HeldPlaces,
    ) -> None:
        """Write the result of each step in one piece, or a large one in several, so that other tasks of the
        event loop can run in between.
        """
        has_logprobs = _has_logprobs(self._submissions[0])
        with ExitStack() as stack:
            timers = [
                stack.enter_context(RequestTimer(self._server.metrics, self._received_s, self._num_sequences))
                for _ in submissions
            ]
            streams = [self._client.open(submission) for submission in submissions]
            for stream in streams:
                stream.keeps_logprobs = False
            self._open.update(enumerate(streams))

            async def begin(number: int) -> None:
                await self._begin_prompt(number, submissions[number])

            quiet = stack.enter_context(self._server.quiet.watched(writer, answer.keeps_open))
            async with aclosing(merged(streams, begin)) as batches:
                async for batch in batches:
                    data, quiet.is_between = b"", False
                    batch.reverse()
                    for position in range(1, len(batch) + 1):
                        prompt, delta = batch.pop()  # it goes as soon as its events have what they need
                        if not position % DELTAS_AT_ONCE or _is_large(delta):
                            await self._server.entrance.take_turn(self._tenant.name)
                        timers[prompt].note_delta(delta)
                        is_early = delta.finish_reason == "abort" and prompt not in self._aborted
                        if is_early:
                            if not writer.has_begun:
                                raise _aborted()
                            # Output that came with the end is sent before the error.
                            delta = msgspec.structs.replace(delta, finish_reason=None, usage=None)
                        if delta.finish_reason is not None:
                            places.give_back(1)
                        is_done = streams[prompt].done_with_logprobs(delta) if has_logprobs else _nothing
                        spelled = answer.events(prompt, delta)
                        del delta
                        for number, events in enumerate(spelled):
                            data = data + events if data else events
                            if number:
                                await self._server.entrance.take_turn(self._tenant.name)
                            if len(data) >= LARGE_WRITE_BYTES:
                                await writer.write(data)
                                # Events that repeat the earlier text hold more tokens, the longer they get.
                                cost = answer.write_cost * len(data)
                                await self._server.pace.spend(self._tenant.name, cost)
                                data = b""
                        is_done()
                        if is_early:
                            if data:
                                await writer.write(data)
                            raise _aborted()
                    if data and not writer.try_write(data):
                        await writer.write(data)
                    quiet.is_between, quiet.line = True, answer.keeps_open


def labelled(submission: Submission, label: str) -> Submission:
    """Return the request under a label that is held for it."""
    options = submission.options
    if submission.label != label:
        options = RequestOptions({**options, "label": label})
    # The same as replace(), which takes longer because it looks up the fields.
    return Submission(
        submission.prompt,
        submission.sampling,
        submission.stream,
        options,
        submission.tenant,
        submission.is_cumulative,
        holds_label=True,
    )


def _is_long(submission: Submission) -> bool:
    """Return True if the answer has more than text and ids."""
    sampling = submission.sampling
    wants_logits = sampling.return_context_logits or sampling.return_generation_logits
    return _has_logprobs(submission) or wants_logits or bool(sampling.additional_outputs)


def _num_chars(completions: Sequence[Completion]) -> int:
    """Return the number of characters and ids in the answer."""
    return sum(len(each.text) + len(each.token_ids) for one in completions for each in one.outputs)


def _has_logprobs(submission: Submission) -> bool:
    sampling = submission.sampling
    return sampling.logprobs is not None or sampling.prompt_logprobs is not None


def _num_kept_bytes(answer: StreamFormat, streams: Mapping[int, AsyncResultStream]) -> int:
    """Return the number of bytes of a stream that are kept: of logprobs, and of output that has come."""
    return answer.num_kept_bytes + sum(stream.num_kept_bytes for stream in streams.values())


def _is_large(delta: Delta) -> bool:
    return len(delta.logprobs) + len(delta.prompt_logprobs) > LARGE_DELTA


def _nothing() -> None:
    pass


def _aborted() -> RequestError:
    return RequestError("the server ended this request early", code="aborted", status=503)


async def all_results(calls: Collection[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all calls concurrently. Raises the first error of any, and cancels the others."""
    failure: Exception | None = None
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except ExceptionGroup as errors:
        # Raised here, the error would refer to the group, and the group and the frames to it. Such a cycle
        # keeps all objects of the request until a garbage collection.
        failure = errors.exceptions[0]
        errors.__traceback__ = None
    if failure is not None:
        try:
            raise failure
        finally:
            del failure, tasks
    return [task.result() for task in tasks]
