"""RequestState: one request on the client's side, and all output of its sequences.

The client owns the original request and its output. Both are kept until the last terminal message, and the
request is submitted again from them when a process of the ring was replaced. A sequence has two readers: the
session records output when it puts it into the caller's mailbox, in its own thread, and the caller receives
it from there in its thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from carousel.client.core.logprobs import NO_LOGPROBS, UNKNOWN_ID, LogprobColumns, TokenLogprob
from carousel.client.core.mailbox import Put, TensorPart
from carousel.client.core.result import Completion, CompletionOutput, Delta, FinishReason, error_from_info
from carousel.client.tracing.request_span import RequestSpan
from runtime.base.errors import CarouselError, RequestError
from runtime.wire.format import TOKEN_BYTES, FloatArray, pack_ids, unpack_floats
from runtime.wire.handle import MAX_ATTEMPT, attempt_of, sibling, split_handle, with_attempt
from runtime.wire.messages import (
    DraftCounts,
    ErrorInfo,
    Finish,
    GenerateRequest,
    Resume,
    SequenceOutput,
    Usage,
)
from runtime.wire.perf_metrics import Stamp
from runtime.wire.sampling_params import SamplingParams

PACKED_UNKNOWN_ID = pack_ids([UNKNOWN_ID])
LOGPROB_BYTES = 2 * TOKEN_BYTES
"""Bytes of a token's id and its logprob."""


class SequenceState:
    """All output of one sequence."""

    __slots__ = (
        "_cumulative_logprob",
        "_num_forgotten",
        "_num_noted",
        "_num_prompt_logprobs",
        "_num_prompt_received",
        "_outputs",
        "_per_token",
        "_pieces",
        "_prompt_ids",
        "_prompt_logprobs_start",
        "_resumed_at",
        "_tensors",
        "_trace",
        "_wants_logprobs",
        "_wants_prompt_logprobs",
        "finish",
        "handle",
        "ids",
        "index",
        "is_open",
        "keeps_logprobs",
        "logprobs",
        "num_chars",
        "num_noted_chars",
        "num_shown",
        "prompt_logprobs",
        "shown_ids",
        "token_ids",
    )

    def __init__(self, request: GenerateRequest, index: int, *, wants_logprobs: bool) -> None:
        self.index = index
        # -- noted by the session
        self.handle = sibling(request.handle, index)
        """Handle of the newest attempt."""
        self.is_open = True
        """True while it has no terminal message."""
        self.ids = bytearray()
        """Packed output ids that have arrived."""
        self.num_noted_chars = 0
        """Number of characters of text that have arrived."""
        self._num_prompt_logprobs = 0
        self._cumulative_logprob = 0.0
        self._trace = request.trace
        """Trace with its attempts, if it is sampled."""
        self._resumed_at = (0, 0)
        """Bytes of output and prompt logprobs that had arrived when its newest attempt was submitted."""
        # -- received by the caller
        self.token_ids: list[int] = []
        self._wants_logprobs = wants_logprobs
        self._wants_prompt_logprobs = index == 0 and request.sampling.prompt_logprobs is not None
        self.logprobs: LogprobColumns[TokenLogprob] = LogprobColumns() if wants_logprobs else NO_LOGPROBS
        self.prompt_logprobs: LogprobColumns[TokenLogprob | None] = (
            LogprobColumns() if self._wants_prompt_logprobs else NO_LOGPROBS
        )
        self.keeps_logprobs = True
        """False if its reader forgets the logprobs of each delta: its output has none then."""
        self._num_prompt_received = 0
        """Number of entries of the prompt's logprobs so far."""
        self._num_noted = 0
        """Number of logprobs that have arrived."""
        self._num_forgotten = 0
        """Number of logprobs that were received and forgotten."""
        self.finish: Finish | None = None
        self.num_chars = 0
        """Number of characters of its text."""
        self.shown_ids: list[int] = []
        """Ids that it would have if its beam search ended now."""
        self.num_shown = 0
        """Number of times that its hypothesis was shown."""
        self._pieces: list[str] = []
        # The server does not say which ids it has kept.
        is_cut = request.sampling.truncate_prompt_tokens is not None
        self._prompt_ids = None if is_cut else request.input_ids
        self._prompt_logprobs_start = request.sampling.prompt_logprobs_start
        self._outputs = request.sampling.additional_outputs
        num_top = request.sampling.logprobs if wants_logprobs else None
        num_prompt_top = request.sampling.prompt_logprobs if self._wants_prompt_logprobs else None
        self._per_token = (_num_entries(num_top), _num_entries(num_prompt_top))
        """Number of logprobs of each token of the output, and of the prompt."""
        self._tensors: dict[str, _RowCollector] = {}

    def note_logprobs(self, output: SequenceOutput) -> None:
        """Record the logprobs of an output that has arrived."""
        of_output, of_prompt = self._per_token
        num_prompt = len(output.prompt_logprobs) // TOKEN_BYTES
        self._num_prompt_logprobs += num_prompt
        self._num_noted += of_output * (len(output.logprobs) // TOKEN_BYTES) + of_prompt * num_prompt
        if output.logprobs:
            # Added one by one in float64, as the detokenizer does, so that the sum has the same bits.
            values = unpack_floats(output.logprobs).astype(np.float64)
            for value in values.tolist():
                self._cumulative_logprob += value

    @property
    def num_logprob_bytes(self) -> int:
        """Number of bytes of its logprobs that are kept: all that have arrived and were not forgotten."""
        return LOGPROB_BYTES * (self._num_noted - self._num_forgotten)

    def forget_logprobs(self, num_output: int, num_prompt: int) -> None:
        """Count the logprobs of so many tokens no longer: those of a delta that has been read."""
        of_output, of_prompt = self._per_token
        self._num_forgotten += of_output * num_output + of_prompt * num_prompt

    @property
    def is_with_scheduler(self) -> bool:
        """Return True if any output of the sequence's newest attempt has arrived. Output of an earlier
        attempt does not count, because the newest may have been lost on the way.
        """
        return (len(self.ids), self._num_prompt_logprobs) != self._resumed_at

    def next_attempt(
        self, request: GenerateRequest, time_limit_ms: int, now: float
    ) -> GenerateRequest | None:
        """Return the request that continues this sequence alone, under the handle of its next attempt; None
        if the number of attempts is exhausted.
        """
        attempt = attempt_of(self.handle) + 1
        if attempt > MAX_ATTEMPT:
            return None
        self.handle = with_attempt(self.handle, attempt)
        self._resumed_at = (len(self.ids), self._num_prompt_logprobs)
        if self._trace is not None:
            self._trace = self._trace.add(Stamp("attempt", now, attempt))
        resume = Resume(
            bytes(self.ids), self.num_noted_chars, self._cumulative_logprob, self._num_prompt_logprobs
        )
        return msgspec.structs.replace(
            request,
            handle=self.handle,
            sampling=request.sampling.of_sequence(self.index),
            time_limit_ms=time_limit_ms,
            resume=resume if any(self._resumed_at) else None,
            trace=self._trace,
        )

    @property
    def text(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def text_from(self, start: int) -> str:
        """Return its text from character `start` on. The cost only depends on the length of the result."""
        num_missing = self.num_chars - start
        parts: list[str] = []
        for piece in reversed(self._pieces):
            if num_missing <= 0:
                break
            parts.append(piece[-num_missing:])
            num_missing -= len(piece)
        return "".join(reversed(parts))

    @property
    def trace_stamps(self) -> tuple[Stamp, ...]:
        """Stamps of the sequence; empty before its end, and for a request that is not sampled."""
        return () if self.finish is None or self.finish.trace is None else self.finish.trace.stamps

    @property
    def finish_reason(self) -> FinishReason | None:
        """Reason why it ended; None while it runs, and if it has failed."""
        reason = None if self.finish is None else self.finish.reason
        return None if reason == "error" else reason

    @property
    def usage(self) -> Usage | None:
        return None if self.finish is None else self.finish.usage

    def receive(self, output: SequenceOutput) -> Delta:
        """Receive the next output. The delta of a failure has no finish reason."""
        text, ids = output.text, _unpack_ids(output.token_ids)
        if text:
            self._pieces.append(text)
            self.num_chars += len(text)
        self.token_ids += ids
        if output.hypothesis:
            self.shown_ids = _unpack_ids(output.hypothesis)
            self.num_shown += 1
        logprobs: LogprobColumns[TokenLogprob] = NO_LOGPROBS
        if output.logprobs and self._wants_logprobs:
            logprobs = LogprobColumns(output.token_ids, output.logprobs, output.top_ids, output.top_logprobs)
            if self.keeps_logprobs:
                self.logprobs.extend(logprobs)
        prompt_logprobs = self._next_prompt_logprobs(output) if self._wants_prompt_logprobs else NO_LOGPROBS
        finish, num_prompt = output.finish, output.num_prompt_tokens
        if finish is None:
            return Delta(text, ids, logprobs, None, None, None, self.index, prompt_logprobs, num_prompt)
        self.finish = finish
        reason, matched, usage = self.finish_reason, finish.matched, finish.usage
        return Delta(
            text,
            ids,
            logprobs,
            reason,
            matched,
            usage,
            self.index,
            prompt_logprobs,
            num_prompt,
            finish.weight_version,
        )

    def receive_rows(self, part: TensorPart) -> None:
        """Receive the next rows of a tensor. Raises RequestError if they are not the next ones."""
        rows = self._tensors.setdefault(part.entry.name, _RowCollector())
        rows.add(part)

    def tensor(self, name: str) -> FloatArray | None:
        """Return a tensor [positions, vocabulary] as far as it has arrived; None if nothing has."""
        rows = self._tensors.get(name)
        return None if rows is None else rows.array()

    def num_rows(self, name: str) -> int:
        """Return the number of positions of a tensor that have come."""
        rows = self._tensors.get(name)
        return 0 if rows is None else rows.num_rows

    @property
    def num_output_rows(self) -> int:
        """Return the number of rows of the output's additional outputs that have arrived."""
        return min((self.num_rows(f"generation_{name}") for name in self._outputs), default=0)

    def additional_outputs(self, part: Literal["context", "generation"]) -> dict[str, FloatArray]:
        """Return the rows of the prompt or of the output by name, as far as they have arrived."""
        rows = {name: self.tensor(f"{part}_{name}") for name in self._outputs}
        return {name: each for name, each in rows.items() if each is not None}

    def output(self, index: int) -> CompletionOutput:
        """Return the sequence so far, under its own index or another."""
        text, token_ids, finish = self.text, list(self.token_ids), self.finish
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=token_ids,
            text_diff=text,
            token_ids_diff=list(token_ids),
            # It grows no more once the sequence has ended.
            logprobs=self.logprobs if finish is not None else self.logprobs[:],
            finish_reason=self.finish_reason,
            matched_stop=None if finish is None else finish.matched,
            cumulative_logprob=None if finish is None else finish.cumulative_logprob,
            score=None if finish is None else finish.score,
            usage=self.usage,
            generation_logits=self.tensor("generation_logits"),
            additional_generation_outputs=self.additional_outputs("generation"),
            request_perf_metrics=None if finish is None else finish.perf_metrics,
            trace_stamps=self.trace_stamps,
            weight_version="" if finish is None else finish.weight_version,
        )

    def _next_prompt_logprobs(self, output: SequenceOutput) -> LogprobColumns[TokenLogprob | None]:
        """Return the prompt logprobs that an output adds, with None for each token before those asked for,
        and at least for the first one. The None entries come with the first logprobs, or at the end.
        """
        num_none = 0
        if not self._num_prompt_received:
            if output.prompt_logprobs:
                num_none = self._prompt_logprobs_start + 1
            elif output.finish is not None:
                num_prompt = output.finish.usage.prompt_tokens
                num_none = max(1, min(self._prompt_logprobs_start + 1, num_prompt))
        if not (num_none or output.prompt_logprobs):
            return NO_LOGPROBS
        start = self._num_prompt_received + num_none
        new: LogprobColumns[TokenLogprob | None] = LogprobColumns(
            self._prompt_ids_from(start, len(output.prompt_logprobs)),
            output.prompt_logprobs,
            output.prompt_top_ids,
            output.prompt_top_logprobs,
            output.prompt_ranks,
            num_none=num_none,
        )
        if self.keeps_logprobs:
            self.prompt_logprobs.extend(new)
        self._num_prompt_received += len(new)
        return new

    def _prompt_ids_from(self, start: int, num_bytes: int) -> bytes:
        """Return packed ids of the prompt from its token `start` on."""
        if self._prompt_ids is None:
            return PACKED_UNKNOWN_ID * (num_bytes // TOKEN_BYTES)
        first = TOKEN_BYTES * start
        return self._prompt_ids[first : first + num_bytes]


class RequestState:
    """State of one request: its parameters, and its sequences."""

    __slots__ = (
        "_by_handle",
        "_num_unfinished",
        "asked",
        "deadline_s",
        "error",
        "generation",
        "has_logprobs",
        "is_aborted",
        "num_open",
        "number",
        "put",
        "request",
        "sequences",
        "span",
    )

    def __init__(
        self, request: GenerateRequest, asked: SamplingParams, put: Put, generation: int = 0, now: float = 0.0
    ) -> None:
        """asked: the outputs that the caller wants; `request` may generate and measure more, to choose from.
        put: of the caller's mailbox.
        """
        self.request = request
        self.asked = asked
        self.number = split_handle(request.handle)[1]
        """Number of the request in its session."""
        sampling = request.sampling
        self.sequences = [
            SequenceState(request, index, wants_logprobs=asked.logprobs is not None)
            for index in range(sampling.n)
        ]
        self._by_handle = {sequence.handle: sequence for sequence in self.sequences}
        """Sequences by the handles of all attempts, because output of an old attempt may still be unread."""
        # -- the session's
        self.put = put
        self.generation = generation
        """Number of restarts that the connection had seen when the request was submitted, or submitted again.
        """
        limit_ms = request.time_limit_ms
        self.deadline_s = now + limit_ms / 1000 if limit_ms else 0.0
        """Time of its deadline; 0: none."""
        self.is_aborted = False
        """True if its caller has asked for an early end."""
        self.has_logprobs = sampling.logprobs is not None or sampling.prompt_logprobs is not None
        self.num_open = len(self.sequences)
        """Number of sequences without a terminal message, as far as output has arrived."""
        # -- the caller's
        self._num_unfinished = len(self.sequences)
        self.span: RequestSpan | None = None
        """Span of the request; None if its caller has no tracer, or has named a trace."""
        self.error: CarouselError | None = None
        """First error of any sequence, or of the request: it has failed."""

    @property
    def open_handles(self) -> tuple[bytes, ...]:
        """Return the newest handles of the sequences without a terminal."""
        return tuple(sequence.handle for sequence in self.sequences if sequence.is_open)

    def next_attempt(self, sequence: SequenceState, now: float) -> GenerateRequest | None:
        """Return the request that submits a sequence again, with the time that is left; None if that is not
        possible.
        """
        left_ms = max(1, round((self.deadline_s - now) * 1000)) if self.deadline_s else 0
        message = sequence.next_attempt(self.request, left_ms, now)
        self._by_handle[sequence.handle] = sequence
        return message

    @property
    def ended(self) -> bool:
        """True if every sequence has its terminal."""
        return self._num_unfinished == 0

    @property
    def is_complete(self) -> bool:
        """True if the request has ended, and not failed."""
        return self.ended and self.error is None

    @property
    def text(self) -> str:
        """Text of the first sequence."""
        return self.sequences[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.sequences[0].token_ids

    @property
    def logprobs(self) -> Sequence[TokenLogprob]:
        return self.sequences[0].logprobs

    def receive(self, items: Sequence[Any]) -> list[Delta]:
        """Receive items of a mailbox in order, and return one delta for each sequence with new output. Rows
        of tensors are kept and give no delta; an error is kept in `error`.
        """
        if len(items) == 1 and isinstance(items[0], SequenceOutput):  # the most frequent case by far
            return self._receive_output(items[0])
        outputs: dict[bytes, list[SequenceOutput]] = {}
        for item in items:
            if isinstance(item, SequenceOutput):
                outputs.setdefault(item.handle, []).append(item)
            elif isinstance(item, TensorPart):
                try:
                    self._by_handle[item.entry.handle].receive_rows(item)
                except RequestError as error:
                    self._fail(error)
            else:
                assert isinstance(item, CarouselError)
                self._fail(item)
        return [delta for news in outputs.values() for delta in self._receive_output(_joined(news))]

    def check(self) -> None:
        """Raise the error with which the request has failed, if it has."""
        if self.error is not None:
            raise self.error.with_traceback(None)

    def _receive_output(self, output: SequenceOutput) -> list[Delta]:
        """Return the delta of an output; none for a failure without further output."""
        delta = self._by_handle[output.handle].receive(output)
        finish = output.finish
        if finish is None:
            return [delta]
        self._num_unfinished -= 1
        if finish.reason != "error":
            if self.ended:
                self.end_span(self.error)
            return [delta]
        self._fail(error_from_info(finish.error or ErrorInfo("the request failed without a reason")))
        return [delta] if output.text or output.token_ids or output.prompt_logprobs else []

    def _fail(self, error: CarouselError) -> None:
        self.error = self.error or error
        self.end_span(error)

    def end_span(self, error: CarouselError | None) -> None:
        """End the span of the request, if it has one. error: the error with which the request ended,
        if any.
        """
        if self.span is not None:
            self.span.end([sequence.finish for sequence in self.sequences], error)

    def completion(self) -> Completion:
        """Return the result of a request that has ended."""
        assert self.ended, "the request has not ended"
        first = self.sequences[0]
        embedding = first.tensor("embedding")
        return Completion(
            outputs=self.outputs(),
            usage=self.total_usage(),
            prompt_logprobs=first.prompt_logprobs,
            context_logits=first.tensor("context_logits"),
            additional_context_outputs=first.additional_outputs("context"),
            label=self.request.label,
            embedding=None if embedding is None else embedding[0],
            prompt=self.request.text or None,
            packed_prompt=self.request.input_ids or b"",
        )

    def outputs(self) -> list[CompletionOutput]:
        """Return the `chosen` sequences so far, each with its index among them."""
        return [sequence.output(index) for index, sequence in enumerate(self.chosen())]

    def chosen(self) -> list[SequenceState]:
        """Return the sequences in order. If there are more than were asked for: the best ones once all have
        ended, and none before.
        """
        num_wanted = self.asked.n
        if num_wanted == len(self.sequences):
            return self.sequences
        if not self.ended:
            return []
        # `sorted` is stable: among equals the first one generated comes first.
        return sorted(self.sequences, key=_rank)[:num_wanted]

    def total_usage(self) -> Usage:
        """Usage of all sequences of a request that has ended."""
        usages = [sequence.usage for sequence in self.sequences]
        first = usages[0]
        assert first is not None
        num_tokens = sum(usage.completion_tokens for usage in usages if usage is not None)
        drafts = [usage.drafts for usage in usages if usage is not None and usage.drafts is not None]
        return Usage(first.prompt_tokens, num_tokens, first.cached_tokens, DraftCounts.sum(drafts))


class _RowCollector:
    """Rows of one tensor. It keeps the frames as they arrived until the whole is asked for. A later attempt
    of the sequence repeats some rows, which are equal and are skipped.
    """

    __slots__ = ("_parts", "num_rows")

    def __init__(self) -> None:
        self._parts: list[FloatArray] = []
        self.num_rows = 0

    def add(self, part: TensorPart) -> None:
        num_known = self.num_rows - part.entry.start
        if num_known < 0:
            raise RequestError(
                f"{part.entry.name}: rows from {part.entry.start} on came where those from "
                f"{self.num_rows} on were expected"
            )
        if memoryview(part.data).nbytes != 4 * math.prod(part.entry.shape):
            raise RequestError(f"{part.entry.name}: a frame is not of the size that it was said to have")
        rows = np.frombuffer(part.data, np.float32).reshape(part.entry.shape)
        if num_known < len(rows):
            self._parts.append(rows[num_known:])
            self.num_rows += len(rows) - num_known

    def array(self) -> FloatArray:
        # Joined even if there is one part, so that the caller gets memory of its own and the received frame
        # is freed.
        if len(self._parts) > 1 or not self._parts[0].flags.owndata:
            self._parts = [np.concatenate(self._parts)]
        return self._parts[0]


def _num_entries(num_top: int | None) -> int:
    """Return the number of logprobs of a token; None: none were asked for."""
    return 0 if num_top is None else 1 + num_top


def _rank(sequence: SequenceState) -> float:
    """Return the sort key by which the best sequence comes first. One that ended before its first token is
    the last.
    """
    finish = sequence.finish
    if finish is None or finish.cumulative_logprob is None or not sequence.token_ids:
        return math.inf
    return -finish.cumulative_logprob


def _joined(outputs: list[SequenceOutput]) -> SequenceOutput:
    """Return several outputs as one, with packed arrays concatenated."""
    if len(outputs) == 1:
        return outputs[0]
    return SequenceOutput(
        outputs[0].handle,
        "".join([output.text for output in outputs]),
        b"".join([output.token_ids for output in outputs]),
        b"".join([output.logprobs for output in outputs]),
        b"".join([output.top_ids for output in outputs]),
        b"".join([output.top_logprobs for output in outputs]),
        outputs[-1].finish,
        b"".join([output.prompt_logprobs for output in outputs]),
        b"".join([output.prompt_top_ids for output in outputs]),
        b"".join([output.prompt_top_logprobs for output in outputs]),
        max(output.num_prompt_tokens for output in outputs),
        next((output.hypothesis for output in reversed(outputs) if output.hypothesis), b""),
        b"".join([output.prompt_ranks for output in outputs]),
    )


def _unpack_ids(data: bytes) -> list[int]:
    """Unpack ids as runtime.wire.format does, directly to ints."""
    if len(data) == TOKEN_BYTES:  # the most frequent case by far
        return [int.from_bytes(data, "little")]
    ids: list[int] = memoryview(data).cast("i").tolist()
    return ids
