"""AnswerReader: turns one sequence into events of its items, for any endpoint, and counts its reasoning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from carousel.server.chat.events import Event
from carousel.server.chat.formats import ReasoningFormat, Thinking, ToolFormat, read_answer
from carousel.server.chat.reader import NO_MARKERS, Markers, Reader
from carousel.server.chat.tools import NO_TOOLS, ToolSet
from carousel.server.request.tokenizer import Vocabulary

PIECE_CHARS = 2048
"""Maximum number of characters that are parsed in one turn of the event loop: a few milliseconds' work."""


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """Formats by which the answers to one request are parsed."""

    tool_format: ToolFormat | None = None
    tools: ToolSet = NO_TOOLS
    max_calls: int | None = None
    reasoning_format: ReasoningFormat | None = None
    thinking: Thinking = "none"
    left_out: Markers = NO_MARKERS
    """Special tokens that are in the text only because the parser needs others."""

    shows_reasoning: bool = True
    """False leaves reasoning out of the answer."""
    is_calls_alone: bool = False
    """True if the answer must consist of calls alone: a call that breaks off before its arguments is left
    out.
    """

    @property
    def special(self) -> tuple[str, ...]:
        """Return spellings that the parser needs, and that a tokenizer may leave out of its text."""
        reasoning = self.reasoning_format
        tags = (
            ()
            if reasoning is None
            else (reasoning.begin, reasoning.end, *reasoning.also_end, *reasoning.special)
        )
        return tags if self.tool_format is None else (*tags, *self.tool_format.special)


class AnswerParser:
    __slots__ = ("_held", "_left_out", "_reader", "_steps")

    def __init__(self, plan: AnswerPlan) -> None:
        self._reader = Reader(plan.tools, max_calls=plan.max_calls)
        self._steps = read_answer(self._reader, plan.tool_format, plan.reasoning_format, plan.thinking)
        self._left_out = plan.left_out
        self._held = ""
        next(self._steps, None)

    @property
    def num_whole_calls(self) -> int:
        return self._reader.num_whole_calls

    @property
    def has_reasoning(self) -> bool:
        return self._reader.has_reasoning

    @property
    def is_thinking(self) -> bool:
        """Return True if the text so far ends within reasoning."""
        return self._reader.is_thinking

    def is_plain(self, text: str) -> bool:
        """Return True if the next text is unchanged text of the text item, so that it need not be pushed."""
        markers, left_out = self._reader.quiet, self._left_out
        if markers is None or self._held:
            return False
        return markers.leave(text) and (left_out is NO_MARKERS or left_out.leave(text))

    def push(self, text: str) -> list[Event]:
        """Parse the next text. Returns the new events."""
        if not text:
            return []
        if self._left_out is not NO_MARKERS:
            text = self._without_special(text)
        return self._read(text)

    def end(self) -> list[Event]:
        """End the text. Returns the last events."""
        self._reader.ended = True
        events = self._read(self._held)
        self._reader.end()
        return events + self._reader.take_events()

    def _read(self, text: str) -> list[Event]:
        self._reader.feed(text)
        next(self._steps, None)
        return self._reader.take_events()

    def _without_special(self, text: str) -> str:
        text = self._left_out.remove(self._held + text)
        num_held = self._left_out.num_held(text, 0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]


class AnswerReader:
    """Events of one sequence, and the number of its reasoning tokens."""

    def __init__(self, plan: AnswerPlan, vocabulary: Vocabulary | None) -> None:
        """`vocabulary` is None if tokens of reasoning are not counted."""
        self._plan = plan
        self._parser = AnswerParser(plan)
        self._vocabulary = vocabulary
        self._ids: list[int] = []
        self._was_thinking = plan.reasoning_format is not None
        self.num_reasoning_tokens = 0
        """Number of reasoning tokens, including the tags."""

    @property
    def num_whole_calls(self) -> int:
        return self._parser.num_whole_calls

    @property
    def has_reasoning(self) -> bool:
        return self._parser.has_reasoning

    def is_plain(self, text: str) -> bool:
        """Return True if the next text is unchanged content, which need not be parsed."""
        return not self._plan.is_calls_alone and self._parser.is_plain(text)

    def read(self, text: str, token_ids: list[int], *, is_last: bool) -> list[Event]:
        """Return the events of the next part of the answer for the client."""
        events = self._parser.push(text)
        if is_last:
            events += self._parser.end()
        if self._was_thinking and self._vocabulary is not None:
            self._count(token_ids)
        return [event for event in events if self._is_shown(event)]

    def pieces(self, text: str, token_ids: list[int], *, is_last: bool) -> Iterator[list[Event]]:
        """Yield what `read` returns, for a long text in pieces, between which others may have a turn."""
        start = 0
        while len(text) - start > PIECE_CHARS:
            events = self._parser.push(text[start : start + PIECE_CHARS])
            start += PIECE_CHARS
            yield [event for event in events if self._is_shown(event)]
        yield self.read(text[start:] if start else text, token_ids, is_last=is_last)

    def _is_shown(self, event: Event) -> bool:
        if event.kind == "text":
            return not self._plan.is_calls_alone
        return event.kind != "reasoning" or self._plan.shows_reasoning

    def _count(self, token_ids: list[int]) -> None:
        """Count tokens while the answer is in reasoning, up to the tag that ends it."""
        assert self._vocabulary is not None
        assert self._plan.reasoning_format is not None
        num_before = len(self._ids)
        self._ids += token_ids
        if not self._parser.has_reasoning:
            return
        if self._parser.is_thinking:
            self.num_reasoning_tokens = len(self._ids)
            return
        self._was_thinking = False
        end = self._plan.reasoning_format.end
        self.num_reasoning_tokens = self._vocabulary.num_up_to(end, self._ids, num_before)
