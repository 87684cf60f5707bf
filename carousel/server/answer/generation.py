"""Generation: answers one HTTP request that generates, by one JSON body or by events.

The response begins with the first result, so a refusal is an HTTP error; a later failure is an event. When
the HTTP client has gone, everything that its request is doing is aborted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import cast

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from carousel.client.core.request.submission import RequestOptions, Submission
from carousel.client.core.result import respelled
from carousel.server.answer.departure import run_until_disconnect
from carousel.server.answer.formats import Format, StreamFormat
from carousel.server.answer.running_prompts import RunningPrompts
from carousel.server.answer.sse import EVENT_HEADERS, JSON_HEADERS, AnswerWriter
from carousel.server.answer.streamed_answer import num_kept_bytes, write_events
from carousel.server.answer.whole_answer import RoomForVectors, WholeAnswer, first_piece
from carousel.server.http.errors import as_request_error
from carousel.server.request.labels import held
from carousel.server.server_state import ServerState
from carousel.server.tenancy.auth import tenant_of
from carousel.server.tenancy.places import HeldPlaces
from carousel.server.tracing.tracing import EndedSequence, RequestTrace, TracedRequest
from runtime.base.errors import RequestError


class Generation(Response):
    """ASGI response of a generating endpoint."""

    _prompts: RunningPrompts

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
        # Response.__init__ is not called: it makes headers, and the AnswerWriter has those of this answer.
        self._server = server
        self._submissions = submissions
        self._param_names = param_names
        self._labels_are_chosen = labels_are_chosen
        self._answer = answer
        self._trace = RequestTrace(None)
        self._labels: Sequence[str] = ()
        """Labels of its prompts in the ring; empty until it is there."""
        self._shown: list[EndedSequence] = []
        """Sequences for the trace, once the answer has all that it needs of them."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request and send the answer. Raises RequestError and RingClosed only while nothing has been
        sent.
        """
        server, received_s = self._server, scope["state"]["received_s"]
        prompts = self._prompts = RunningPrompts(server, tenant_of(scope), self._submissions, scope["state"])
        # Not with a name here: only a trace with content keeps the prompts.
        self._trace = server.begin_trace(
            TracedRequest(scope, self._submissions, received_s, server.config.model_names[0])
        )
        if self._submissions[0].stream:
            answer = cast(StreamFormat, self._answer)
            writer = self._writer(scope, send, partial(num_kept_bytes, answer, prompts.streams))
            work = self._stream(writer, answer)
        else:
            work = self._complete(scope, receive, send)
        failure: BaseException | None = None
        try:
            is_traced = self._trace.traceparent is not None
            await run_until_disconnect(scope["state"], work, prompts.abort_all if is_traced else None)
        except RequestError as error:
            failure = error.with_traceback(None)  # its frames refer to it: a cycle for the collector
            raise respelled(error, self._param_names) from None
        finally:
            if self._trace.traceparent is not None:
                self._trace.end(self._shown or self._ended(), failure)
                if server.http_spans is not None:
                    server.http_spans.note(self._labels, received_s, time.perf_counter())
            prompts.streams.clear()
            failure = None

    def _ended(self) -> list[EndedSequence]:
        """Return the sequences that have ended, for the request's trace, if it has one."""
        if self._trace.traceparent is None:
            return []
        return self._prompts.ended(has_content=self._trace.has_content)

    def _writer(self, scope: Scope, send: Send, num_kept: Callable[[], int]) -> AnswerWriter:
        """Return a writer of the answer, of which so many bytes are kept until it is written."""
        state, server = scope["state"], self._server
        kept = server.unread.kept(state["transport"], self._prompts.tenant.name, num_kept)
        headers = EVENT_HEADERS if self._submissions[0].stream else JSON_HEADERS
        return AnswerWriter(send, state, kept, server.entrance, headers)

    @contextmanager
    def _hold(self, prompts_at_once: int) -> Iterator[HeldPlaces]:
        """Hold the request's labels and places while it runs. Both are free again when the end of the answer
        is sent, because its reader may use them at once. Raises InvalidRequest, Overloaded.
        """
        server, prompts, tenant = self._server, self._prompts, self._prompts.tenant
        labels = [submission.label for submission in self._submissions]
        with (
            server.places.hold(tenant, prompts_at_once * prompts.num_sequences) as places,
            held(prompts.client.labels, tenant.name, labels, are_chosen=self._labels_are_chosen) as own,
            server.running.hold(tenant.name, prompts, labels, prompts.num_chars),
        ):
            self._labels = own
            named = [labelled(*each) for each in zip(self._submissions, own, strict=True)]
            self._submissions = prompts.submissions = [self._traced(submission) for submission in named]
            del named
            yield places

    def _traced(self, submission: Submission) -> Submission:
        traceparent = self._trace.traceparent
        if traceparent is None:
            return submission
        options = RequestOptions({**submission.options, "traceparent": traceparent})
        return msgspec.structs.replace(submission, options=options)

    async def _complete(self, scope: Scope, receive: Receive, send: Send) -> None:
        prompts, places_of = self._prompts, self._server.places
        most_at_once = places_of.most_at_once(prompts.tenant, prompts.client.max_in_flight)
        at_once = min(len(self._submissions), max(1, most_at_once // prompts.num_sequences))
        with ExitStack() as stack:
            places = stack.enter_context(self._hold(at_once))
            self._submissions = await prompts.cut()
            vectors: RoomForVectors | None = None
            if prompts.are_embedded:
                vectors = stack.enter_context(self._server.vectors.held(prompts.tenant.name))
            is_parsed = self._answer.is_parsed
            whole = WholeAnswer(prompts, places, vectors, at_once, is_parsed=is_parsed)
            completions = await whole.completions()
            num_bytes = sum(each.num_packed_bytes for each in completions) if prompts.has_large_parts else 0
            pieces = iter(self._answer.pieces(completions))
            first = await first_piece(prompts, pieces, completions, is_parsed=is_parsed)
        # From here on the answer has what it needs of them.
        del completions
        self._shown = self._ended()
        prompts.streams.clear()
        writer = self._writer(scope, send, lambda: num_bytes)
        last = await writer.write_pieces(first, pieces)
        if writer.has_begun:
            await writer.end(last)
        else:
            await Response(last, media_type="application/json")(scope, receive, send)

    async def _stream(self, writer: AnswerWriter, answer: StreamFormat) -> None:
        try:
            with self._hold(len(self._submissions)) as places:
                self._submissions = await self._prompts.cut()
                last = await write_events(self._prompts, places, writer, answer)
            last += answer.last_events() + answer.done
        except Exception as error:
            if not writer.has_begun:
                raise
            failure = as_request_error(error)
            error.__traceback__ = None  # its frames refer to it: a cycle for the collector
            last = await writer.write_pieces(b"", answer.failure_events(failure))
        await writer.end(last)


def labelled(submission: Submission, label: str) -> Submission:
    """Return the request under a label that is held for it."""
    options = submission.options
    if submission.label != label:
        options = RequestOptions({**options, "label": label})
    return msgspec.structs.replace(submission, options=options, holds_label=True)
