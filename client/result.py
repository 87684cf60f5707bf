"""What a caller gets: deltas, completions and errors, and the state of one sequence that they are made from.

The client is the owner of the original request and of everything received so far; both stay here until the
terminal message.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from runtime.errors import InvalidRequest, Overloaded, RequestAborted, RequestError, Unauthorized
from runtime.messages import ErrorInfo, Finish, GenerateRequest, SequenceOutput, Usage
from runtime.wire import unpack_floats, unpack_ids

PROMPT_FIELDS = frozenset({"text", "input_ids"})
FinishReason: TypeAlias = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities at one output position, of the raw logits unless the server says otherwise."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob) of the most likely tokens, as many as were asked for, most likely first."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of a sequence. The last one has a
    `finish_reason`, `usage` and everything else that ends it.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    """One for each of token_ids; empty when logprobs were not asked for."""
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    """The stop string or stop token id that ended it; None when the model's own end token or the length did.
    """
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished sequence."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    matched_stop: str | int | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """One for each of token_ids; empty when logprobs were not asked for."""
    cumulative_logprob: float | None = None
    label: str = ""


@dataclass(slots=True, eq=False)
class SequenceState:
    """One sequence on the client's side: its request, and all that has come back."""

    request: GenerateRequest
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None

    def receive(self, outputs: list[SequenceOutput]) -> Delta:
        """Take in outputs, in order, and return them as one delta. Raises the RequestError they end in."""
        text = "".join([output.text for output in outputs])
        ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        for output in outputs:
            new_ids: list[int] = unpack_ids(output.token_ids).tolist()
            ids += new_ids
            if output.logprobs:
                logprobs += _unpack_logprobs(new_ids, output)
        self.text += text
        self.token_ids += ids
        self.logprobs += logprobs
        finish = self.finish = outputs[-1].finish
        if finish is None:
            return Delta(text, ids, logprobs)
        return Delta(text, ids, logprobs, _finish_reason(finish), finish.matched, finish.usage)

    def completion(self) -> Completion:
        """The whole of a finished sequence."""
        finish = self.finish
        assert finish is not None, "the sequence has not finished"
        return Completion(
            text=self.text,
            token_ids=self.token_ids,
            finish_reason=_finish_reason(finish),
            usage=finish.usage,
            matched_stop=finish.matched,
            logprobs=self.logprobs,
            cumulative_logprob=finish.cumulative_logprob,
            label=self.request.label,
        )


def _finish_reason(finish: Finish) -> FinishReason:
    if finish.reason == "error":
        raise error_from_info(finish.error or ErrorInfo("the request failed without a reason"))
    return finish.reason


def error_from_info(info: ErrorInfo) -> RequestError:
    """The exception that the other end described, in the caller's words: a prompt is one argument here."""
    message, param = info.message, info.param
    if param in PROMPT_FIELDS:
        message, param = f"prompt: {message.removeprefix(f'{param}: ')}", "prompt"
    if info.status == Overloaded.status and info.code == Overloaded.code:
        return Overloaded(message)
    for kind in (InvalidRequest, Unauthorized, RequestAborted):
        if info.status == kind.status:
            return kind(message, param=param, code=info.code)
    return RequestError(message, param=param, code=info.code, status=info.status)


def _unpack_logprobs(token_ids: list[int], output: SequenceOutput) -> list[TokenLogprob]:
    values: list[float] = unpack_floats(output.logprobs).tolist()
    if not output.top_ids:
        return [TokenLogprob(token, value) for token, value in zip(token_ids, values, strict=True)]
    top_ids = unpack_ids(output.top_ids).reshape(len(values), -1).tolist()
    top_values = unpack_floats(output.top_logprobs).reshape(len(values), -1).tolist()
    return [
        TokenLogprob(token, value, tuple(zip(ids, tops, strict=True)))
        for token, value, ids, tops in zip(token_ids, values, top_ids, top_values, strict=True)
    ]
