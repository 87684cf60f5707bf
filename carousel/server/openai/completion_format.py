"""CompletionFormat: spells the answers of /v1/completions, independent of HTTP."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from msgspec import UNSET, UnsetType
from msgspec.json import encode

from carousel.client.core.logprobs import PromptLogprobs, packed_logprobs
from carousel.client.core.result import Completion, CompletionOutput, Delta
from carousel.server.answer.sse import TEXT_MARK, DoneEvents, TextEvent, sse_event
from carousel.server.openai.logprobs import (
    CompletionColumns,
    NumChars,
    ShownTokens,
    TokenSpeller,
    delta_pieces,
    prompt_pieces,
)
from carousel.server.openai.response_types import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
    PromptLogprobsJson,
    UsageBody,
    last_hidden_states,
)
from carousel.server.openai.stop_reason import finish_reason_of, stop_reason_of
from carousel.server.openai.usage import UsageCount, usage_body, usage_of
from carousel.server.server_state import new_id
from carousel.server.spelling.large_parts import LargeParts


@dataclass(slots=True)
class CompletionView:
    """Parts of an answer beside the text."""

    model: str
    num_choices: int = 1
    """Number of choices for each prompt."""
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    skips_special: bool = True
    """True if special tokens are left out of the output's text."""
    shows_output: bool = True
    """False if the request asks for no tokens, so that only the prompt is shown."""
    shows_ids: bool = False
    shows_hidden_states: bool = False
    streams_usage: bool = False
    counts_continuously: bool = False
    speller: TokenSpeller | None = None
    """Given if there are logprobs of any kind."""
    prompt_ids: list[list[int]] = field(default_factory=list)
    """Given if the answer shows or counts them."""
    prompt_texts: list[str] = field(default_factory=list)
    """Given if the answer begins with them."""


class CompletionFormat(DoneEvents):
    def __init__(self, view: CompletionView, num_prompts: int) -> None:
        self._id = new_id("cmpl")
        self._created = int(time.time())
        self._view = view
        num_choices = num_prompts * view.num_choices
        self._columns: list[CompletionColumns] = []
        """Columns of each choice, if there are logprobs."""
        if view.num_logprobs is not None:
            assert view.speller is not None
            self._columns = [CompletionColumns(view.speller, view.num_logprobs) for _ in range(num_choices)]
            skips = view.skips_special
            self._num_output_chars: NumChars = partial(_output_chars, view.speller, skips_special=skips)
        self._large = LargeParts()
        self._plain: list[TextEvent | None] = [None] * num_choices
        self._prompt_logprobs: list[list[PromptLogprobs]] = [[] for _ in range(num_prompts)]
        """Parts of each prompt's logprobs, in the order of arrival, if the answer begins with the prompt."""
        self._held: list[list[Delta] | None] = [[] if view.prompt_texts else None for _ in range(num_prompts)]
        """Deltas that came before everything that the answer shows of the prompt; None once that is sent."""
        self._told_prompt_ids: set[int] = set()
        """Choices that have shown the ids of their prompt: once is enough in a stream."""
        self._usage = UsageCount(num_prompts)
        if view.prompt_ids:
            self._usage.expect_prompts([len(ids) for ids in view.prompt_ids])
        self._is_plain = not (view.counts_continuously or view.shows_ids or view.num_logprobs is not None)

    # -- a stream --------------------------------------------------------------------------------------------

    def events(self, prompt: int, delta: Delta) -> Iterator[bytes]:
        self._usage.add(prompt, delta)
        held = self._held[prompt]
        if held is None:
            yield from self._events(prompt, delta)
            return
        held.append(delta)
        if delta.prompt_logprobs:
            self._prompt_logprobs[prompt].append(delta.prompt_logprobs)
        # A sequence that has ended before its prompt logprobs will not bring them.
        has_ended = delta.index == 0 and delta.finish_reason is not None
        if not has_ended and self._awaits_prompt_logprobs(prompt):
            return
        self._held[prompt] = None
        for index in range(self._view.num_choices):
            yield from self._echo_events(prompt, index)
        self._prompt_logprobs[prompt] = []
        for each in held:
            yield from self._events(prompt, each)

    @property
    def num_kept_bytes(self) -> int:
        return sum(packed_logprobs(part).num_bytes for parts in self._prompt_logprobs for part in parts)

    def last_events(self) -> bytes:
        return sse_event(self._body([], self._total_usage())) if self._view.streams_usage else b""

    def _awaits_prompt_logprobs(self, prompt: int) -> bool:
        if self._view.num_logprobs is None:
            return False
        return sum(map(len, self._prompt_logprobs[prompt])) < len(self._view.prompt_ids[prompt])

    def _events(self, prompt: int, delta: Delta) -> Iterator[bytes]:
        return (data for part in delta_pieces(delta) if (data := self._event(prompt, part)))

    def _event(self, prompt: int, delta: Delta) -> bytes:
        number = prompt * self._view.num_choices + delta.index
        if delta.finish_reason is None:
            has_news = delta.text or delta.logprobs or (self._view.shows_ids and delta.token_ids)
            if not self._view.shows_output or not has_news:
                return b""
            if self._is_plain:
                return self._plain_event(number).with_text(delta.text)
        choice = self._choice(number, delta)
        if self._view.shows_output and self._view.num_logprobs is not None:
            ids = delta.token_ids if delta.logprobs else []
            tokens = ShownTokens(delta.logprobs, ids, self._num_output_chars)
            choice.logprobs = self._columns[number].of(tokens)
        return sse_event(self._body([choice], self._event_usage()))

    def _plain_event(self, number: int) -> TextEvent:
        event = self._plain[number]
        if event is None:
            choice = CompletionChoice(number, TEXT_MARK, None, None, None, None)
            event = self._plain[number] = TextEvent(self._body([choice], self._event_usage()))
        return event

    def _echo_events(self, prompt: int, index: int) -> Iterator[bytes]:
        """Yield the prompt's text, in the first event, and its logprobs."""
        number = prompt * self._view.num_choices + index
        text = self._view.prompt_texts[prompt]
        pieces: Iterable[CompletionLogprobs | None] = (None,)
        if self._view.num_logprobs is not None:
            echoed = self._echoed(prompt, self._prompt_logprobs[prompt])
            columns = self._columns[number]
            pieces = (columns.of(piece) for part in echoed for piece in part.pieces(self._num_top))
        for logprobs in pieces:
            choice = CompletionChoice(number, text, logprobs, None, None, None)
            yield sse_event(self._body([choice], self._event_usage()))
            text = ""

    def _event_usage(self) -> UsageBody | UnsetType | None:
        if self._view.counts_continuously:
            return self._total_usage()
        return None if self._view.streams_usage else UNSET

    def _total_usage(self) -> UsageBody:
        return self._shown_usage(self._usage.body())

    # -- a whole answer --------------------------------------------------------------------------------------

    def pieces(self, completions: Sequence[Completion]) -> Iterator[bytes]:
        yield from self._large.filled(encode(self._response(completions)))

    def _response(self, completions: Sequence[Completion]) -> CompletionResponse:
        choices = []
        for prompt, completion in enumerate(completions):
            for output in completion.outputs:
                number = prompt * self._view.num_choices + output.index
                choices.append(self._whole_choice(prompt, number, completion, output))
        return self._body(choices, self._shown_usage(usage_of(completions)))

    def _whole_choice(
        self, prompt: int, number: int, completion: Completion, output: CompletionOutput
    ) -> CompletionChoice:
        view = self._view
        choice = self._choice(number, output)
        if output.score is not None and output.cumulative_logprob is not None:
            choice.score, choice.cumulative_logprob = output.score, output.cumulative_logprob
        if view.num_logprobs is not None:
            shown = self._echoed(prompt, [completion.prompt_logprobs])
            if view.shows_output and output.logprobs:
                shown.append(ShownTokens(output.logprobs, output.token_ids, self._num_output_chars))
            pieces = partial(self._columns[number].pieces, shown)
            choice.logprobs = self._large.add(CompletionLogprobs, pieces)
        if view.shows_hidden_states:
            choice.hidden_states = last_hidden_states(output)
        if view.prompt_texts:
            choice.text = view.prompt_texts[prompt] + choice.text
        if view.num_prompt_logprobs is not None:
            choice.prompt_logprobs = self._prompt_logprobs_body(completion.prompt_logprobs, prompt)
        return choice

    def _prompt_logprobs_body(self, logprobs: PromptLogprobs, prompt: int) -> PromptLogprobsJson:
        view = self._view
        assert view.speller is not None
        assert view.num_prompt_logprobs is not None
        pieces = partial(prompt_pieces, logprobs, view.speller, view.num_prompt_logprobs)
        return self._large.add(PromptLogprobsJson, pieces)

    # -- both ------------------------------------------------------------------------------------------------

    def _choice(self, number: int, part: Delta | CompletionOutput) -> CompletionChoice:
        view = self._view
        reason, stop_reason = finish_reason_of(part), stop_reason_of(part)
        if not view.shows_output:
            return CompletionChoice(number, "", None, "length", None, None)
        choice = CompletionChoice(number, part.text, None, reason, part.matched_stop, stop_reason)
        if view.shows_ids:
            choice.token_ids = part.token_ids
            if number not in self._told_prompt_ids:
                self._told_prompt_ids.add(number)
                choice.prompt_token_ids = view.prompt_ids[number // view.num_choices]
        return choice

    @property
    def _num_top(self) -> int:
        return self._view.num_logprobs or 0

    def _echoed(self, prompt: int, parts: Sequence[PromptLogprobs]) -> list[ShownTokens]:
        """Return the prompt's tokens, if the answer begins with them. `parts` are their logprobs, which
        follow one another.
        """
        if not self._view.prompt_texts:
            return []
        assert self._view.speller is not None
        ids, start = self._view.prompt_ids[prompt], 0
        num_chars = partial(_echoed_chars, self._view.speller, self._view.prompt_texts[prompt])
        shown: list[ShownTokens] = []
        # A request that was ended early has not computed all of them.
        for part in (*parts, [None] * (len(ids) - sum(map(len, parts)))):
            shown.append(ShownTokens(part, ids[start : start + len(part)], num_chars))
            start += len(part)
        return shown

    def _shown_usage(self, usage: UsageBody) -> UsageBody:
        if self._view.shows_output:
            return usage
        return usage_body(usage.prompt_tokens, 0, usage.prompt_tokens_details.cached_tokens)

    def _body(
        self, choices: list[CompletionChoice], usage: UsageBody | UnsetType | None
    ) -> CompletionResponse:
        return CompletionResponse(
            self._id, "text_completion", self._created, self._view.model, choices, usage
        )


def _output_chars(speller: TokenSpeller, token_id: int, _: int, *, skips_special: bool) -> int:
    return speller.num_chars(token_id, skips_special=skips_special)


def _echoed_chars(speller: TokenSpeller, text: str, token_id: int, offset: int) -> int:
    return speller.num_chars_at(token_id, text, offset)
