"""GenerateFormat: spells the answers of /generate, in which an event repeats all output so far.

Output is encoded once, when it comes, and kept as bytes of JSON. Each event is put together from these bytes,
so it costs a copy, and all events of a stream cost no more encoding than the whole answer. Only logprobs for
which there is no room as JSON are encoded again. What is large is yielded in pieces.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import msgspec
from msgspec import UNSET, UnsetType

from carousel.client.core.logprobs import NO_LOGPROBS, LogprobColumns, PromptLogprobs, packed_logprobs
from carousel.client.core.result import Completion, CompletionOutput, Delta
from carousel.server.answer.sse import DoneEvents
from carousel.server.request.tokenizer import Vocabulary
from carousel.server.sglang.generate_types import FinishInfo, MetaInfo
from carousel.server.sglang.grown_logprobs import COST_OF_SPELLING, GrownLogprobs, JsonRoom
from carousel.server.spelling.json_list import JsonList
from carousel.server.spelling.large_parts import rows_json
from carousel.server.spelling.logprob_json import NumberFrame
from carousel.server.spelling.token_table import TokenTable
from runtime.sampling.additional_outputs import HIDDEN_STATES
from runtime.wire.messages import Usage

_encode = msgspec.json.Encoder().encode

EVENT_PIECE_BYTES = 64 << 10


def _bare_frame(token_id: int) -> NumberFrame:
    return b"[", b",%d,null]" % token_id


BARE_FRAMES = TokenTable[NumberFrame](_bare_frame)
"""Entries without texts."""


def frames_with_texts(vocabulary: Vocabulary) -> TokenTable[NumberFrame]:
    """Return the JSON around the logprob of each token, with its text."""

    def frame(token_id: int) -> NumberFrame:
        return b"[", b",%d,%b]" % (token_id, _encode(vocabulary.token_text(token_id)))

    return vocabulary.tables.of("generate", frame)


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
    frames: TokenTable[NumberFrame] = field(default_factory=lambda: BARE_FRAMES)
    """JSON around the logprob of each token."""
    room: JsonRoom = field(default_factory=JsonRoom)
    """Room for logprobs as JSON, of all streams."""
    input_ids: list[list[int]] = field(default_factory=list)
    """Ids of each prompt, if the answer shows its logprobs."""
    input_start: int = 0
    """First token of a prompt whose logprobs are shown."""
    shows_hidden_states: bool = False
    """True to show the additional output of that name in SGLang's field, and not among the others."""


class _Sequence:
    """Output of one sequence so far. Its text is JSON without the quotes."""

    __slots__ = ("ids", "logprobs", "num_tokens", "text")

    def __init__(self, logprobs: GrownLogprobs) -> None:
        self.text = bytearray()
        self.num_tokens = 0
        self.ids, self.logprobs = JsonList(), logprobs


class _Input:
    """Logprobs of one prompt so far."""

    __slots__ = ("logprobs", "num_tokens")

    def __init__(self, logprobs: GrownLogprobs) -> None:
        self.num_tokens = 0
        """Number of prompt tokens that have come, from the first one on, whether they are shown or not."""
        self.logprobs = logprobs


class GenerateFormat(DoneEvents):
    def __init__(self, view: GenerateView, num_prompts: int) -> None:
        self._began_s = time.perf_counter()
        self._view = view
        self._sequences = [_Sequence(self._grown()) for _ in range(num_prompts * view.num_choices)]
        self._inputs = [_Input(self._grown()) for _ in range(num_prompts)]

    def _grown(self) -> GrownLogprobs:
        return GrownLogprobs(self._view.frames, self._view.num_top, self._view.room)

    @property
    def write_cost(self) -> int:
        return COST_OF_SPELLING if any(each.is_packed for each in self._kept()) else 1

    @property
    def num_kept_bytes(self) -> int:
        return sum(each.num_bytes for each in self._kept())

    def _kept(self) -> Iterator[GrownLogprobs]:
        yield from (each.logprobs for each in self._sequences)
        yield from (each.logprobs for each in self._inputs)

    def events(self, prompt: int, delta: Delta) -> Iterator[bytes]:
        number = prompt * self._view.num_choices + delta.index
        for _ in self._take(prompt, number, delta):
            yield b""
        if (
            delta.logprobs or delta.prompt_logprobs
        ):  # they have been taken, and what follows may wait for long
            delta = msgspec.structs.replace(delta, logprobs=NO_LOGPROBS, prompt_logprobs=NO_LOGPROBS)
        if delta.finish_reason is not None:
            for _ in self._complete_input(prompt):
                yield b""
        if delta.token_ids or delta.text or delta.finish_reason is not None:
            index = number if self._view.is_list else UNSET
            yield from _batched(chain((b"data: ",), self._body(number, delta, index), (b"\n\n",)))

    def last_events(self) -> bytes:
        """Return no events: every sequence has its own last one."""
        return b""

    def pieces(self, completions: Sequence[Completion]) -> Iterator[bytes]:
        return _batched(self._whole(completions))

    def _whole(self, completions: Sequence[Completion]) -> Iterator[bytes | bytearray]:
        """Yield the answer, whose logprobs stay packed until they are written."""
        before = b"[" if self._view.is_list else b""
        for prompt, completion in enumerate(completions):
            self._hold_input(prompt, completion.prompt_logprobs)
            for output in completion.outputs:
                number = prompt * self._view.num_choices + output.index
                sequence = self._sequences[number]
                sequence.text += _encode(output.text)[1:-1]
                sequence.num_tokens = len(output.token_ids)
                sequence.ids.extend(output.token_ids)
                if output.logprobs:
                    sequence.logprobs.hold(output.token_ids, output.logprobs)
                context = completion if output.index == 0 else None
                yield before
                yield from self._body(number, output, UNSET, context)
                before = b","
        if self._view.is_list:
            yield b"]"

    def _hold_input(self, prompt: int, entries: PromptLogprobs) -> None:
        if self._view.input_ids:
            taken = self._inputs[prompt]
            for ids, part in self._shown_input(prompt, entries):
                taken.logprobs.hold(ids, part)
            num_missing = len(self._view.input_ids[prompt]) - taken.num_tokens
            for ids, part in self._shown_input(prompt, [None] * num_missing):
                taken.logprobs.hold(ids, part)

    def _take(self, prompt: int, number: int, delta: Delta) -> Iterator[None]:
        """Encode new output. Yields between the pieces of much output, so that other tasks may run."""
        if delta.prompt_logprobs and self._view.input_ids:
            yield from self._take_input(prompt, delta.prompt_logprobs)
        sequence = self._sequences[number]
        sequence.text += _encode(delta.text)[1:-1]
        sequence.num_tokens += len(delta.token_ids)
        sequence.ids.extend(delta.token_ids)
        if delta.logprobs:
            yield from sequence.logprobs.add(delta.token_ids, delta.logprobs)

    def _take_input(self, prompt: int, entries: PromptLogprobs) -> Iterator[None]:
        """Encode logprobs of a prompt."""
        for ids, part in self._shown_input(prompt, entries):
            yield from self._inputs[prompt].logprobs.add(ids, part)

    def _shown_input(
        self, prompt: int, entries: PromptLogprobs
    ) -> Iterator[tuple[Sequence[int], PromptLogprobs]]:
        """Yield what is shown of the prompt's next tokens. As in SGLang, the first one that is shown has no
        value, whatever comes before it.
        """
        ids, taken = self._view.input_ids[prompt], self._inputs[prompt]
        columns, first = packed_logprobs(entries), taken.num_tokens
        taken.num_tokens += len(columns)
        start, end = max(self._view.input_start, first), min(taken.num_tokens, len(ids))
        if start == self._view.input_start and start < end:
            yield ids[start : start + 1], LogprobColumns(num_none=1)
            start += 1
        if start < end:
            yield ids[start:end], columns.part(start - first, end - first)

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
            shown = self._inputs[prompt].logprobs if part.finish_reason is not None else None
            yield b',"input_token_logprobs":['
            yield from shown.values() if shown else ()
            if view.num_top and view.input_ids:
                yield b'],"input_top_logprobs":['
                yield from shown.tops() if shown else ()
            yield b"]"
            yield b',"output_token_logprobs":['
            yield from sequence.logprobs.values()
            yield b"]"
            if view.num_top:
                yield b',"output_top_logprobs":['
                yield from sequence.logprobs.tops()
                yield b"]"
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


def _logits(completion: Completion | None, output: CompletionOutput) -> Iterator[bytes | bytearray]:
    """Yield the fields with raw logits. `completion` as in `_body`."""
    context = None if completion is None else completion.context_logits
    for name, rows in ((b"context_logits", context), (b"generation_logits", output.generation_logits)):
        if rows is not None:
            yield b',"%b":' % name
            yield from rows_json(rows)


def _outputs(completion: Completion | None, output: CompletionOutput) -> Iterator[bytes | bytearray]:
    """Yield the fields with additional outputs."""
    context = {} if completion is None else completion.additional_context_outputs
    for name, outputs in (
        (b"additional_context_outputs", context),
        (b"additional_generation_outputs", output.additional_generation_outputs),
    ):
        before = b',"%b":{' % name
        for key, rows in outputs.items():
            yield before + _encode(key) + b":"
            yield from rows_json(rows)
            before = b","
        if outputs:
            yield b"}"


def _hidden_states(completion: Completion | None, output: CompletionOutput) -> Iterator[bytes | bytearray]:
    """Yield SGLang's field of the meta_info: the prompt's rows as one entry, then each row of the output as
    one.
    """
    context = {} if completion is None else completion.additional_context_outputs
    entries = [context[HIDDEN_STATES]] if HIDDEN_STATES in context else []
    entries += [row[None] for row in output.additional_generation_outputs.get(HIDDEN_STATES, ())]
    before = b',"hidden_states":['
    for rows in entries:
        yield before
        yield from rows_json(rows)
        before = b","
    yield b"]" if entries else before + b"]"


def _batched(parts: Iterable[bytes | bytearray]) -> Iterator[bytes]:
    """Yield JSON in pieces that are neither small, of which each would be a turn of the loop, nor large."""
    data = bytearray()
    for part in parts:
        data += part
        if len(data) >= EVENT_PIECE_BYTES:
            batch, data, part = bytes(data), bytearray(), b""  # one copy is kept while it is written
            yield batch
            del batch
    if data:
        yield bytes(data)


def _finish_info(part: Delta | CompletionOutput, num_tokens: int) -> FinishInfo | None:
    if part.finish_reason == "stop":
        return FinishInfo("stop", matched=part.matched_stop)
    if part.finish_reason == "length":
        return FinishInfo("length", length=num_tokens)
    if part.finish_reason == "abort":
        return FinishInfo("abort", message="ended by /abort_request")
    return FinishInfo("timeout") if part.finish_reason == "timeout" else None
