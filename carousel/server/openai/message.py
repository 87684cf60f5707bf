"""MessageReader: one choice's answer as OpenAI's message, whole and in deltas."""

from __future__ import annotations

from carousel.client.core.result import CompletionOutput, Delta
from carousel.server.chat.answer import AnswerParser, AnswerPlan
from carousel.server.chat.events import Event, ItemBegun, ItemDelta
from carousel.server.openai.responses import (
    ChatDelta,
    ChatMessageBody,
    FunctionCall,
    FunctionCallDelta,
    ToolCall,
    ToolCallDelta,
)
from carousel.server.request.tokenizer import Vocabulary


def is_text(delta: ChatDelta) -> bool:
    return delta.content is not None


class MessageReader:
    def __init__(self, plan: AnswerPlan, vocabulary: Vocabulary | None) -> None:
        """`vocabulary` is None if tokens of reasoning are not counted."""
        self._plan = plan
        self._parser = AnswerParser(plan)
        self._vocabulary = vocabulary
        self._num_calls = 0
        self._ids: list[int] = []
        self._was_thinking = plan.reasoning_format is not None
        self.num_reasoning_tokens = 0
        """Number of reasoning tokens, including the tags."""

    @property
    def num_whole_calls(self) -> int:
        return self._parser.num_whole_calls

    def is_plain(self, text: str) -> bool:
        """Return True if the next text is unchanged content, which need not be parsed."""
        return not self._plan.is_calls_alone and self._parser.is_plain(text)

    def read(self, delta: Delta) -> list[ChatDelta]:
        """Parse the next part of the answer. Returns the deltas for the client."""
        events = self._events(delta.text, delta.token_ids, is_last=delta.finish_reason is not None)
        return [spelled for event in events if (spelled := self._spelled(event)) is not None]

    def whole(self, output: CompletionOutput) -> ChatMessageBody:
        """Return the message of a whole answer."""
        message = ChatMessageBody("assistant", None)
        has_reasoning = self._plan.reasoning_format is not None and self._plan.shows_reasoning
        if has_reasoning:
            message.reasoning_content = message.reasoning = None
        for event in self._events(output.text, output.token_ids, is_last=True):
            if isinstance(event, ItemBegun) and event.kind == "tool_call":
                calls = message.tool_calls = message.tool_calls or []
                calls.append(ToolCall(event.id, FunctionCall(event.name, "")))
            elif not isinstance(event, ItemDelta):
                continue
            elif event.kind == "tool_call":
                assert message.tool_calls
                message.tool_calls[-1].function.arguments += event.text
            elif event.kind == "text":
                if not self._plan.is_calls_alone:
                    message.content = (message.content or "") + event.text
            elif has_reasoning:
                message.reasoning_content = message.reasoning = (message.reasoning or "") + event.text
        if message.content is None and not message.tool_calls and not self._parser.has_reasoning:
            message.content = ""
        return message

    def _events(self, text: str, token_ids: list[int], *, is_last: bool) -> list[Event]:
        events = self._parser.push(text)
        if is_last:
            events += self._parser.end()
        if self._was_thinking and self._vocabulary is not None:
            self._count(token_ids)
        return events

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

    def _spelled(self, event: Event) -> ChatDelta | None:
        """Return the delta for an event; None if the client is told nothing."""
        if isinstance(event, ItemBegun) and event.kind == "tool_call":
            self._num_calls += 1
            call = ToolCallDelta(self._num_calls - 1, FunctionCallDelta(event.name, ""), event.id, "function")
            return ChatDelta(tool_calls=[call])
        if not isinstance(event, ItemDelta):
            return None
        if event.kind == "text":
            return None if self._plan.is_calls_alone else ChatDelta(content=event.text)
        if event.kind == "tool_call":
            arguments = FunctionCallDelta(arguments=event.text)
            return ChatDelta(tool_calls=[ToolCallDelta(self._num_calls - 1, arguments)])
        if not self._plan.shows_reasoning:
            return None
        return ChatDelta(reasoning_content=event.text, reasoning=event.text)
