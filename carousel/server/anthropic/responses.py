"""Bodies of the Messages API's answers, and the events of its streams."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import UNSET, Meta, Raw, Struct, UnsetType


class MadeText(Struct, tag_field="type", tag="text"):
    text: str


class MadeThinking(Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class MadeToolUse(Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: Annotated[Raw, Meta(extra_json_schema={"type": "object"})]


MadeBlock: TypeAlias = MadeText | MadeThinking | MadeToolUse
StopReason: TypeAlias = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class OutputTokensDetails(Struct):
    thinking_tokens: int


class MessagesUsage(Struct):
    input_tokens: int
    """Number of tokens of the prompt that were computed. It has as many more as were read from the cache."""
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    """Always 0: every prefix is kept, and none at a price of its own."""
    output_tokens_details: OutputTokensDetails | UnsetType = UNSET
    """Given if the server separates reasoning, at the end of the answer."""


class MessagesResponse(Struct, tag_field="type", tag="message"):
    id: str
    model: str
    content: list[MadeBlock]
    usage: MessagesUsage
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    """Stop sequence that ended the answer."""
    role: Literal["assistant"] = "assistant"


class CountTokensResponse(Struct):
    input_tokens: int


# -- events --------------------------------------------------------------------------------------------------


class MessageStart(Struct, tag_field="type", tag="message_start"):
    message: MessagesResponse


class BlockStart(Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: MadeBlock


class TextDelta(Struct, tag_field="type", tag="text_delta"):
    text: str


class InputDelta(Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


class ThinkingDelta(Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(Struct, tag_field="type", tag="signature_delta"):
    signature: str


class BlockDelta(Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextDelta | InputDelta | ThinkingDelta | SignatureDelta


class BlockStop(Struct, tag_field="type", tag="content_block_stop"):
    index: int


class MessageEnd(Struct):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct, tag_field="type", tag="message_delta"):
    delta: MessageEnd
    usage: MessagesUsage


class MessageStop(Struct, tag_field="type", tag="message_stop"):
    pass


class PingEvent(Struct, tag_field="type", tag="ping"):
    """Event without a meaning."""
