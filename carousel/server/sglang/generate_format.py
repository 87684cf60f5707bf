"""GenerateFormat: spells the answers of /generate, in which an event repeats all output so far.

Output is encoded once, when it comes, and kept as bytes of JSON. Each event is put together from these bytes,
so it costs a copy, and all events of a stream cost no more encoding than the whole answer.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET, UnsetType

from carousel.client.core.logprobs import PromptLogprobs, TokenLogprob
from carousel.client.core.result import Completion, CompletionOutput, Delta
from carousel.server.openai.logprobs import finite, in_pieces
from carousel.server.request.json_list import JsonList
from carousel.server.request.sse import DoneEvents
from carousel.server.request.tokenizer import TokenText
from carousel.server.sglang.generate_types import FinishInfo, Logprob, MetaInfo
from runtime.sampling.additional_outputs import HIDDEN_STATES
from runtime.wire.format import FloatArray
from runtime.wire.messages import Usage

_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class GenerateView:
    """Parts of an answer beside text and ids."""

    ids: list[str]
    """Ids of the prompts' requests."""
    is_list: bool = False
    num_choices: int = 1
    """Number of choices for each prompt."""
    shows_logprobs: bool = False
    num_top: int = 0
    token_text: TokenText | None = None
    input_ids: list[list[int]] = field(default_factory=list)
    """Ids of each prompt, if the answer shows its logprobs."""
    input_start: int = 0
    """First token of a prompt whose logprobs are shown."""
    shows_hidden_states: bool = False
    """True to show the additional output of that name in SGLang's field, and not among the others."""


class _Sequence:
    """Output of one sequence so far. Its text is JSON without the quotes."""

    __slots__ = ("ids", "logprobs", "num_tokens", "text", "top")

    def __init__(self) -> None:
        self.text = bytearray()
        self.num_tokens = 0
        self.ids, self.logprobs, self.top = JsonList(), JsonList(), JsonList()


class _Input:
    """Logprobs of one prompt so far."""

    __slots__ = ("logprobs", "num_tokens", "top")

    def __init__(self) -> None:
        self.num_tokens = 0
        """Number of prompt tokens that have come, from the first one on, whether they are shown or not."""
        self.logprobs, self.top = JsonList(), JsonList()


class GenerateFormat(DoneEvents):
    def __init__(self, view: GenerateView, num_prompts: int) -> None:
        self._began_s = time.perf_counter()
        self._view = view
        self._sequences = [_Sequence() for _ in range(num_prompts * view.num_choices)]
        self._inputs = [_Input() for _ in range(num_prompts)]

    def events(self, prompt: int, delta: Delta) -> Iterator[bytes]:
        number = prompt * self._view.num_choices + delta.index
        for _ in self._take(prompt, number, delta.prompt_logprobs, delta):
            yield b""
        if delta.finish_reason is not None:
            for _ in self._complete_input(prompt):
                yield b""
        if delta.token_ids or delta.text or delta.finish_reason is not None:
            index = number if self._view.is_list else UNSET
            yield b"".join((b"data: ", *self._body(number, delta, index), b"\n\n"))

    def last_events(self) -> bytes:
        """Return no events: every sequence has its own last one."""
        return b""

    def response(self, completions: Sequence[Completion]) -> msgspec.Raw | list[msgspec.Raw]:
        bodies: list[msgspec.Raw] = []
        for prompt, completion in enumerate(completions):
            prompt_logprobs = completion.prompt_logprobs
            for output in completion.outputs:
                number = prompt * self._view.num_choices + output.index
                _exhaust(self._take(prompt, number, prompt_logprobs, output))
                prompt_logprobs = []
                _exhaust(self._complete_input(prompt))
                context = completion if output.index == 0 else None
                body = self._body(number, output, UNSET, context)
                bodies.append(msgspec.Raw(b"".join(body)))
        return bodies if self._view.is_list else bodies[0]

    def _take(
        self,
        prompt: int,
        number: int,
        prompt_logprobs: PromptLogprobs,
        part: Delta | CompletionOutput,
    ) -> Iterator[None]:
        """Encode new output. Yields between the pieces of much output, so that other tasks may run."""
        if prompt_logprobs and self._view.input_ids:
            yield from self._take_input(prompt, prompt_logprobs)
        sequence = self._sequences[number]
        sequence.text += _encode(part.text)[1:-1]
        sequence.num_tokens += len(part.token_ids)
        sequence.ids.extend(part.token_ids)
        for entries in in_pieces(part.logprobs, self._view.num_top):
            tokens: list[Logprob] = []
            tops: list[list[Logprob]] = []
            for entry in entries:
                tokens.append(self._logprob(entry.logprob, entry.token_id))
                tops.append(self._top(entry))
            sequence.logprobs.extend(tokens)
            if self._view.num_top:
                sequence.top.extend(tops)
            yield

    def _take_input(self, prompt: int, entries: PromptLogprobs) -> Iterator[None]:
        """Encode logprobs of a prompt. As in SGLang, the first shown token has no value, whatever comes
        before it.
        """
        ids, start, taken = self._view.input_ids[prompt], self._view.input_start, self._inputs[prompt]
        for piece in in_pieces(entries, self._view.num_top):
            tokens: list[Logprob] = []
            tops: list[list[Logprob] | None] = []
            for position, entry in enumerate(piece, taken.num_tokens):
                if position >= start and position < len(ids):
                    shown = entry if position > start else None
                    tokens.append(self._logprob(None if shown is None else shown.logprob, ids[position]))
                    tops.append(None if shown is None else self._top(shown))
            taken.num_tokens += len(piece)
            taken.logprobs.extend(tokens)
            if self._view.num_top:
                taken.top.extend(tops)
            yield

    def _complete_input(self, prompt: int) -> Iterator[None]:
        """Add tokens of the prompt without values, if they were not computed before its end."""
        if self._view.input_ids:
            num_missing = len(self._view.input_ids[prompt]) - self._inputs[prompt].num_tokens
            yield from self._take_input(prompt, [None] * num_missing)

    def _body(
        self,
        number: int,
        part: Delta | CompletionOutput,
        shown_index: int | UnsetType,
        completion: Completion | None = None,
    ) -> Iterable[bytes | bytearray]:
        """Yield the pieces of a GenerateResponse. `completion` is given if the prompt's rows are shown with
        it.
        """
        view, sequence = self._view, self._sequences[number]
        prompt = number // view.num_choices
        meta = MetaInfo(view.ids[prompt], _finish_info(part, sequence.num_tokens), sequence.num_tokens)
        usage: Usage | None = part.usage
        if usage is not None:
            meta.prompt_tokens = usage.prompt_tokens
            meta.completion_tokens = usage.completion_tokens
            meta.cached_tokens = usage.cached_tokens
            meta.e2e_latency = time.perf_counter() - self._began_s
            meta.weight_version = part.weight_version
            if usage.drafts is not None:
                meta.spec_verify_ct = usage.completion_tokens - usage.drafts.num_accepted
                meta.spec_draft_token_num = usage.drafts.num_drafted
                meta.spec_accept_token_num = usage.drafts.num_accepted
        if not isinstance(part, Delta) and part.score is not None and part.cumulative_logprob is not None:
            meta.score, meta.cumulative_logprob = part.score, part.cumulative_logprob
        yield from (b'{"text":"', sequence.text, b'","output_ids":[', sequence.ids.data, b'],"meta_info":')
        yield _encode(meta)[:-1]
        if view.shows_logprobs:
            # The prompt's logprobs come once, in the last event, like its usage.
            shown = self._inputs[prompt] if part.finish_reason is not None else _Input()
            yield from (b',"input_token_logprobs":[', shown.logprobs.data, b"]")
            if view.num_top and view.input_ids:
                yield from (b',"input_top_logprobs":[', shown.top.data, b"]")
            yield from (b',"output_token_logprobs":[', sequence.logprobs.data, b"]")
            if view.num_top:
                yield from (b',"output_top_logprobs":[', sequence.top.data, b"]")
        if isinstance(part, Delta):
            yield b"}"
        else:
            if view.shows_hidden_states:
                yield from _hidden_states(completion, part)
            yield b"}"
            yield from _logits(completion, part)
            if not view.shows_hidden_states:
                yield from _outputs(completion, part)
        yield b"}" if isinstance(shown_index, UnsetType) else b',"index":%d}' % shown_index

    def _top(self, entry: TokenLogprob) -> list[Logprob]:
        return [self._logprob(value, token_id) for token_id, value in entry.top]

    def _logprob(self, value: float | None, token_id: int) -> Logprob:
        text = None if self._view.token_text is None else self._view.token_text(token_id)
        return Logprob(None if value is None else finite(value), token_id, text)


def _logits(completion: Completion | None, output: CompletionOutput) -> Iterator[bytes | bytearray]:
    """Yield the fields with raw logits. `completion` as in `_body`."""
    context = None if completion is None else completion.context_logits
    for name, rows in ((b"context_logits", context), (b"generation_logits", output.generation_logits)):
        if rows is not None:
            yield from (b',"%b":[' % name, _rows(rows), b"]")


def _outputs(completion: Completion | None, output: CompletionOutput) -> Iterator[bytes | bytearray]:
    """Yield the fields with additional outputs."""
    context = {} if completion is None else completion.additional_context_outputs
    for name, outputs in (
        (b"additional_context_outputs", context),
        (b"additional_generation_outputs", output.additional_generation_outputs),
    ):
        if outputs:
            each = [b"".join((_encode(key), b":[", _rows(rows), b"]")) for key, rows in outputs.items()]
            yield b',"%b":{%b}' % (name, b",".join(each))


def _hidden_states(completion: Completion | None, output: CompletionOutput) -> Iterator[bytes | bytearray]:
    """Yield SGLang's field of the meta_info: the prompt's rows as one entry, then each row of the output as
    one.
    """
    context = {} if completion is None else completion.additional_context_outputs
    yield b',"hidden_states":['
    if HIDDEN_STATES in context:
        yield from (b"[", _rows(context[HIDDEN_STATES]), b"]")
    for n, row in enumerate(output.additional_generation_outputs.get(HIDDEN_STATES, ())):
        yield from (b"," if n or HIDDEN_STATES in context else b"", b"[", _rows(row[None]), b"]")
    yield b"]"


def _rows(rows: FloatArray) -> bytearray:
    """Encode rows, one at a time."""
    encoded = JsonList()
    for row in rows:
        encoded.extend([row.tolist()])
    return encoded.data


def _exhaust(pieces: Iterable[None]) -> None:
    for _ in pieces:
        pass


def _finish_info(part: Delta | CompletionOutput, num_tokens: int) -> FinishInfo | None:
    if part.finish_reason == "stop":
        return FinishInfo("stop", matched=part.matched_stop)
    if part.finish_reason == "length":
        return FinishInfo("length", length=num_tokens)
    if part.finish_reason == "abort":
        return FinishInfo("abort", message="ended by /abort_request")
    return FinishInfo("timeout") if part.finish_reason == "timeout" else None
