"""GenerateFormat: how /generate spells its answers. An event repeats all there is so far. Knows no HTTP."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET, UnsetType

from api_server.generate_types import FinishInfo, GenerateResponse, Logprob, MetaInfo
from api_server.logprobs import finite
from api_server.sse import sse_event
from api_server.tokenizer import TokenText
from client.result import Completion, CompletionOutput, Delta, TokenLogprob
from runtime.messages import Usage


@dataclass(slots=True)
class GenerateView:
    """What an answer shows, beside text and ids."""

    ids: list[str]
    """Of each prompt."""
    is_list: bool = False
    num_choices: int = 1
    """For each prompt."""
    shows_logprobs: bool = False
    num_top: int = 0
    token_text: TokenText | None = None
    input_ids: list[list[int]] = field(default_factory=list)
    """Of each prompt, where the answer shows its logprobs,"""
    input_start: int = 0
    """from this token on."""


class _Sequence:
    """All that has come of one sequence so far."""

    __slots__ = ("ids", "logprobs", "text", "top")

    def __init__(self) -> None:
        self.text = ""
        self.ids: list[int] = []
        self.logprobs: list[Logprob] = []
        self.top: list[list[Logprob]] = []


class GenerateFormat:
    def __init__(self, view: GenerateView, num_prompts: int) -> None:
        self._began_s = time.perf_counter()
        self._view = view
        self._sequences = [_Sequence() for _ in range(num_prompts * view.num_choices)]
        self._inputs: list[list[TokenLogprob | None]] = [[] for _ in range(num_prompts)]

    def events(self, prompt: int, delta: Delta) -> bytes:
        self._inputs[prompt] += delta.prompt_logprobs
        number = prompt * self._view.num_choices + delta.index
        self._take(number, delta)
        if not delta.token_ids and not delta.text and delta.finish_reason is None:
            return b""
        return sse_event(self._body(number, delta, number if self._view.is_list else UNSET))

    def last_events(self) -> bytes:
        """None: every sequence has told its own."""
        return b""

    def response(self, completions: Sequence[Completion]) -> msgspec.Struct | list[msgspec.Struct]:
        bodies: list[msgspec.Struct] = []
        for prompt, completion in enumerate(completions):
            self._inputs[prompt] = completion.prompt_logprobs
            for output in completion.outputs:
                number = prompt * self._view.num_choices + output.index
                self._take(number, output)
                bodies.append(self._body(number, output, UNSET))
        return bodies if self._view.is_list else bodies[0]

    def _take(self, number: int, part: Delta | CompletionOutput) -> None:
        sequence = self._sequences[number]
        sequence.text += part.text
        sequence.ids += part.token_ids
        for entry in part.logprobs:
            sequence.logprobs.append(self._logprob(entry.logprob, entry.token_id))
            sequence.top.append([self._logprob(value, token_id) for token_id, value in entry.top])

    def _body(
        self, number: int, part: Delta | CompletionOutput, shown_index: int | UnsetType
    ) -> GenerateResponse:
        view, sequence = self._view, self._sequences[number]
        prompt = number // view.num_choices
        meta = MetaInfo(view.ids[prompt], _finish_info(part, len(sequence.ids)), len(sequence.ids))
        usage: Usage | None = part.usage
        if usage is not None:
            meta.prompt_tokens = usage.prompt_tokens
            meta.completion_tokens = usage.completion_tokens
            meta.cached_tokens = usage.cached_tokens
            meta.e2e_latency = time.perf_counter() - self._began_s
        if view.shows_logprobs:
            meta.input_token_logprobs = []
            meta.output_token_logprobs = sequence.logprobs
            if view.num_top:
                meta.output_top_logprobs = sequence.top
            if view.input_ids:
                self._add_inputs(meta, prompt)
        return GenerateResponse(sequence.text, sequence.ids, meta, shown_index)

    def _add_inputs(self, meta: MetaInfo, prompt: int) -> None:
        """As SGLang: the first token that is shown has no value, whatever stands before it."""
        ids, start = self._view.input_ids[prompt], self._view.input_start
        entries = self._inputs[prompt]
        tokens: list[Logprob] = []
        tops: list[list[Logprob] | None] = []
        for position in range(start, len(ids)):
            entry = entries[position] if start < position < len(entries) else None
            tokens.append(self._logprob(None if entry is None else entry.logprob, ids[position]))
            tops.append(None if entry is None else [self._logprob(value, each) for each, value in entry.top])
        meta.input_token_logprobs = tokens
        if self._view.num_top:
            meta.input_top_logprobs = tops

    def _logprob(self, value: float | None, token_id: int) -> Logprob:
        text = None if self._view.token_text is None else self._view.token_text(token_id)
        return Logprob(None if value is None else finite(value), token_id, text)


def _finish_info(part: Delta | CompletionOutput, num_tokens: int) -> FinishInfo | None:
    if part.finish_reason == "stop":
        return FinishInfo("stop", matched=part.matched_stop)
    if part.finish_reason == "length":
        return FinishInfo("length", length=num_tokens)
    return FinishInfo("timeout") if part.finish_reason == "timeout" else None
