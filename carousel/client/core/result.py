"""Results of a request: deltas, completions and errors. Knows their meaning; knows no connection."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import msgspec

from carousel.client.core.logprobs import NO_LOGPROBS, PromptLogprobs, TokenLogprob, packed_logprobs
from runtime.base.errors import (
    AdapterNotResident,
    Forbidden,
    InvalidRequest,
    Overloaded,
    RateLimited,
    RequestAborted,
    RequestError,
    Unauthorized,
)
from runtime.wire.format import FloatArray, unpack_ids
from runtime.wire.messages import ErrorInfo, Usage
from runtime.wire.perf_metrics import RequestPerfMetrics, Stamp

PROMPT_FIELDS = frozenset({"text", "input_ids"})
_NAME = re.compile(r"\b[a-z]+(?:_[a-z]+)+\b")
"""A parameter in a message: a word with an underscore, unlike `prompt`, which may be any word."""
FinishReason: TypeAlias = Literal["stop", "length", "abort", "timeout"]


# A struct, because one is made for each token of each stream: a frozen dataclass costs ten times as much.
class Delta(msgspec.Struct, frozen=True):
    """New output of one sequence. Its last delta has a `finish_reason`, `usage` and everything else that
    comes at the end.
    """

    text: str
    token_ids: list[int]
    logprobs: Sequence[TokenLogprob]
    """Log-probabilities of the token_ids; empty if they were not asked for."""
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    """Stop string, stop word or stop token id that ended it; None if it was the model's own end token, a
    limit or an abort.
    """
    usage: Usage | None = None
    """Usage of this sequence."""
    index: int = 0
    """Number of the sequence in its request."""
    prompt_logprobs: PromptLogprobs = NO_LOGPROBS
    """Next log-probabilities of the prompt, if asked for; with the first sequence only."""
    num_prompt_tokens: int = 0
    """Length of the prompt, in the first delta of each sequence of a stream; 0 in all others."""
    weight_version: str = ""
    """Version of the weights that the sequence ended with."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One generated sequence, finished or in progress."""

    index: int
    """Index of the sequence in its request; with best_of its rank, best first."""
    text: str
    token_ids: list[int]
    """Generated ids, without the prompt."""
    text_diff: str
    """Text since the last output that was taken; in a Completion the whole text."""
    token_ids_diff: list[int]
    logprobs: Sequence[TokenLogprob] = field(default_factory=lambda: NO_LOGPROBS)
    """Log-probabilities of the token_ids; empty if they were not asked for."""
    finish_reason: FinishReason | None = None
    """Reason why the sequence ended; None while it runs."""
    matched_stop: str | int | None = None
    """Stop string, stop word or stop token id that ended it; None if it was the model's own end token, a
    limit or an abort.
    """
    cumulative_logprob: float | None = None
    """Sum of the logprobs of token_ids, for a finished sequence with logprobs, best_of or use_beam_search."""
    score: float | None = None
    """Score of a beam search: the sum divided by (number of token_ids) ** length_penalty."""
    usage: Usage | None = None
    """Usage of this sequence, once it has finished."""
    generation_logits: FloatArray | None = field(default=None, compare=False)
    """Raw logits [output tokens, vocabulary] float32, if asked for; None if none were computed."""
    additional_generation_outputs: dict[str, FloatArray] = field(default_factory=dict, compare=False)
    """Additional outputs by name, [output tokens but the last, width] float32, if asked for. Names without
    rows are missing.
    """
    request_perf_metrics: RequestPerfMetrics | None = None
    """Times and pages of the sequence, if asked for, once it has finished."""
    trace_stamps: tuple[Stamp, ...] = ()
    """Stamps of a sampled request's sequence, once it has finished."""
    weight_version: str = field(default="", compare=False)
    """Version of the weights that it ended with, once it has finished."""

    @property
    def stop_reason(self) -> str | int | None:
        """Same as `matched_stop`, under vLLM's name."""
        return self.matched_stop

    @property
    def outputs(self) -> list[CompletionOutput]:
        """List with this output only, for code that expects a result with several outputs."""
        return [self]


@dataclass(frozen=True, slots=True)
class Completion:
    """Result of a finished request. Its properties are those of the first sequence, which with best_of is the
    best.
    """

    outputs: list[CompletionOutput]
    """Outputs, as many as `n` asked for."""
    usage: Usage
    """Tokens of the prompt, counted once, and of all generated sequences, including those that best_of has
    not chosen. Cached tokens are those of the first sequence, since the others find its prompt in the cache.
    """
    prompt_logprobs: PromptLogprobs = field(default_factory=lambda: NO_LOGPROBS)
    """Log-probabilities of the prompt's tokens; empty if not asked for."""
    context_logits: FloatArray | None = field(default=None, compare=False)
    """Raw logits [prompt tokens, vocabulary] float32, if asked for; None if none were computed."""
    additional_context_outputs: dict[str, FloatArray] = field(default_factory=dict, compare=False)
    """Additional outputs by name, [prompt tokens, width] float32, if asked for with gather_context."""
    label: str = ""
    embedding: FloatArray | None = field(default=None, compare=False)
    """Vector [hidden_size] float32, if the request was for an embedding."""
    given_text: str | bytes | None = field(default=None, compare=False, repr=False)
    """Text of the prompt, as UTF-8 if it is long; None for one of token ids and for a conversation."""
    packed_prompt: bytes = field(default=b"", compare=False, repr=False)
    """Packed token ids of a prompt that was given as ids."""

    @property
    def prompt(self) -> str | None:
        """Prompt as it was given; None for one of token ids and for a conversation."""
        text = self.given_text
        return text.decode() if isinstance(text, bytes) else text

    @property
    def prompt_token_ids(self) -> list[int] | None:
        """Token ids of the prompt as they were given; None for a text and for a conversation."""
        return unpack_ids(self.packed_prompt).tolist() if self.packed_prompt else None

    @property
    def num_packed_bytes(self) -> int:
        """Number of bytes of its log-probabilities, logits, additional outputs and vectors."""
        arrays = [self.embedding, self.context_logits, *self.additional_context_outputs.values()]
        logprobs = [self.prompt_logprobs]
        for output in self.outputs:
            arrays += [output.generation_logits, *output.additional_generation_outputs.values()]
            logprobs.append(output.logprobs)
        total = sum(array.nbytes for array in arrays if array is not None)
        return total + sum(packed_logprobs(entries).num_bytes for entries in logprobs)

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        reason = self.outputs[0].finish_reason
        assert reason is not None
        return reason

    @property
    def matched_stop(self) -> str | int | None:
        return self.outputs[0].matched_stop

    @property
    def logprobs(self) -> Sequence[TokenLogprob]:
        return self.outputs[0].logprobs

    @property
    def cumulative_logprob(self) -> float | None:
        return self.outputs[0].cumulative_logprob


def error_from_info(info: ErrorInfo) -> RequestError:
    """Return the exception for an error of the server, in the caller's terms: a prompt is one
    argument here.
    """
    message, param = info.message, info.param
    if param in PROMPT_FIELDS:
        message, param = f"prompt: {message.removeprefix(f'{param}: ')}", "prompt"
    if info.status == RateLimited.status:
        return RateLimited(message, code=info.code, retry_after_s=info.retry_after_s)
    if info.status == Overloaded.status and info.retry_after_s:
        return Overloaded(message, code=info.code, retry_after_s=info.retry_after_s)
    if info.status == Overloaded.status and info.code == Overloaded.code:
        return Overloaded(message)
    if info.code == AdapterNotResident.code:
        return AdapterNotResident(message, param=param)
    for kind in (InvalidRequest, Unauthorized, Forbidden, RequestAborted):
        if info.status == kind.status:
            return kind(message, param=param, code=info.code)
    return RequestError(message, param=param, code=info.code, status=info.status)


def aborted_completion(num_outputs: int) -> Completion:
    """Return the result of a prompt that was aborted before any output."""
    usage = Usage(0, 0)
    outputs = [
        CompletionOutput(index, "", [], "", [], finish_reason="abort", usage=usage)
        for index in range(num_outputs)
    ]
    return Completion(outputs, usage)


def respelled(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """Return the error, of the same class, with its parameter by the name that its reader has for it, and
    others that its message names. Returns the error itself if its parameter has no other name.
    """
    name = names.get(error.param or "")
    if name is None or error.param is None:
        return error
    message, rest = "", error.message
    if rest.startswith(error.param):
        message, rest = name, rest.removeprefix(error.param)
    message += _NAME.sub(lambda word: names.get(word[0], word[0]), rest)
    return type(error)(message, param=name, code=error.code, status=error.status)


@contextmanager
def respelling(names: Mapping[str, str]) -> Iterator[None]:
    """Respell the error of a request that leaves the block."""
    try:
        yield
    except RequestError as error:
        raise respelled(error, names) from None
