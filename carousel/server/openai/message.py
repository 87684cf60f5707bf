"""MessageReader: one choice's answer as OpenAI's message, whole and in deltas."""

from __future__ import annotations

from collections.abc import Iterator

from carousel.client.core.result import CompletionOutput, Delta
from carousel.server.chat.answer import AnswerPlan, AnswerReader
from carousel.server.chat.events import Event, ItemBegun, ItemDelta
from carousel.server.openai.response_types import (
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
        self._reader = AnswerReader(plan, vocabulary)
        self.is_plain = self._reader.is_plain
        self._num_calls = 0

    @property
    def num_whole_calls(self) -> int:
        return self._reader.num_whole_calls

    @property
    def num_reasoning_tokens(self) -> int:
        return self._reader.num_reasoning_tokens

    def pieces(self, delta: Delta) -> Iterator[list[ChatDelta]]:
        """Parse the next part of the answer. Yields the deltas for the client, those of a long text in
        pieces.
        """
        is_last = delta.finish_reason is not None
        for events in self._reader.pieces(delta.text, delta.token_ids, is_last=is_last):
            yield [spelled for event in events if (spelled := self._spelled(event)) is not None]

    def whole(self, output: CompletionOutput) -> ChatMessageBody:
        """Return the message of a whole answer."""
        message = ChatMessageBody("assistant", None)
        if self._plan.reasoning_format is not None and self._plan.shows_reasoning:
            message.reasoning_content = message.reasoning = None
        for event in self._reader.read(output.text, output.token_ids, is_last=True):
            if isinstance(event, ItemBegun) and event.kind == "tool_call":
                calls = message.tool_calls = message.tool_calls or []
                calls.append(ToolCall(event.id, FunctionCall(event.name, "")))
            elif not isinstance(event, ItemDelta):
                continue
            elif event.kind == "tool_call":
                assert message.tool_calls
                message.tool_calls[-1].function.arguments += event.text
            elif event.kind == "text":
                message.content = (message.content or "") + event.text
            else:
                message.reasoning_content = message.reasoning = (message.reasoning or "") + event.text
        if message.content is None and not message.tool_calls and not self._reader.has_reasoning:
            message.content = ""
        return message

    def _spelled(self, event: Event) -> ChatDelta | None:
        """Return the delta for an event; None if the client gets none."""
        if isinstance(event, ItemBegun) and event.kind == "tool_call":
            self._num_calls += 1
            call = ToolCallDelta(self._num_calls - 1, FunctionCallDelta(event.name, ""), event.id, "function")
            return ChatDelta(tool_calls=[call])
        if not isinstance(event, ItemDelta):
            return None
        if event.kind == "text":
            return ChatDelta(content=event.text)
        if event.kind == "tool_call":
            arguments = FunctionCallDelta(arguments=event.text)
            return ChatDelta(tool_calls=[ToolCallDelta(self._num_calls - 1, arguments)])
        return ChatDelta(reasoning_content=event.text, reasoning=event.text)
