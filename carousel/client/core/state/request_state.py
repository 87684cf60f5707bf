"""RequestState: one request on the client's side, and all output of its sequences.

The client owns the original request and its output. Both are kept until the last terminal message, and the
request is submitted again from them when a process of the ring was replaced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from carousel.client.core.logprobs import TokenLogprob
from carousel.client.core.mailbox import Put, TensorPart
from carousel.client.core.result import Completion, CompletionOutput, Delta, error_from_info
from carousel.client.core.state.joined import joined
from carousel.client.core.state.sequence_state import SequenceState
from carousel.client.tracing.request_span import RequestSpan
from runtime.base.errors import CarouselError, RequestError
from runtime.wire.handle import split_handle
from runtime.wire.messages import DraftCounts, ErrorInfo, GenerateRequest, SequenceOutput, Usage
from runtime.wire.sampling_params import SamplingParams

LONG_CHARS = 1 << 16
"""Length from which on a text is kept as UTF-8."""


class RequestState:
    """State of one request: its parameters, and its sequences."""

    __slots__ = (
        "_by_handle",
        "_num_unfinished",
        "_utf8",
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
        """The request; once it is sent, without a long text that is not ASCII (`pack_text`)."""
        self._utf8: bytes | None = None
        """Such a text."""
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

    def pack_text(self) -> None:
        """Keep a long prompt as UTF-8. As a str it takes up to four bytes for each character, and as many as
        UTF-8 has beside them once it has been encoded.
        """
        text = self.request.text
        if text is not None and len(text) >= LONG_CHARS and not text.isascii():
            self._utf8 = text.encode()
            self.request = msgspec.structs.replace(self.request, text=None)

    def next_attempt(self, sequence: SequenceState, now: float) -> GenerateRequest | None:
        """Return the request that submits a sequence again, with the time that is left; None if that is not
        possible.
        """
        left_ms = max(1, round((self.deadline_s - now) * 1000)) if self.deadline_s else 0
        request = self.request
        if self._utf8 is not None:
            request = msgspec.structs.replace(request, text=self._utf8.decode())
        message = sequence.next_attempt(request, left_ms, now)
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
        return [delta for news in outputs.values() for delta in self._receive_output(joined(news))]

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
            given_text=self._utf8 or self.request.text or None,
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


def _rank(sequence: SequenceState) -> float:
    """Return the sort key by which the best sequence comes first. One that ended before its first token is
    the last.
    """
    finish = sequence.finish
    if finish is None or finish.cumulative_logprob is None or not sequence.token_ids:
        return math.inf
    return -finish.cumulative_logprob
