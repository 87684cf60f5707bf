"""Bodies of the Messages API's requests: their fields, types and bounds.

`carousel.server.request.field_table` handles fields that are not declared here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Raw, Struct, field

from carousel.server.openai.types import CacheSalt, NumTokens, StopText, TimeLimit
from runtime.wire.format import TURNS, Priority

MAX_BLOCKS = 4096
"""Maximum number of blocks in a message, and of texts in a system prompt or a result."""
JsonObject: TypeAlias = Annotated[Raw, Meta(extra_json_schema={"type": "object"})]


class CacheControl(Struct, forbid_unknown_fields=True):
    """Mark of a prefix to keep. No effect: every prefix is kept as long as there is room."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Struct, forbid_unknown_fields=True, kw_only=True):
    text: str
    type: Literal["text"]
    cache_control: CacheControl | None = None


TextBlocks: TypeAlias = Annotated[list[TextBlock], Meta(max_length=MAX_BLOCKS)]


class BlockBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Block of a message's content. FIELDS_OF_BLOCKS says which fields each type has."""

    type: Literal["text", "tool_use", "tool_result", "thinking"]
    text: str | None = None
    id: str | None = None
    """Id of a call."""
    name: str | None = None
    """Name of the tool that is called."""
    input: JsonObject = field(default_factory=Raw)
    """Arguments of a call."""
    tool_use_id: str | None = None
    """Id of the call that a result belongs to."""
    content: str | TextBlocks | None = None
    """Result of a call."""
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None
    """No effect: reasoning needs no signature here."""
    cache_control: CacheControl | None = None


FIELDS_OF_BLOCKS = {
    "text": ("text",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
    "thinking": ("thinking",),
}
"""Required fields of each type of block."""
OPTIONAL_FIELDS = {"tool_result": ("content", "is_error"), "thinking": ("signature",)}
"""Further fields, besides those of all types."""


class TurnBody(Struct, forbid_unknown_fields=True, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[BlockBody], Meta(max_length=MAX_BLOCKS)]


class ThinkingBody(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: NumTokens | None = None
    """Maximum number of tokens of reasoning, with type enabled."""
    display: Literal["summarized", "omitted"] | None = None
    """`omitted` leaves reasoning out of the answer. It is never summarized."""


class ToolUseChoiceBody(Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """Name of the tool, with type tool."""
    disable_parallel_tool_use: bool | None = None


class OutputFormatBody(Struct, forbid_unknown_fields=True, kw_only=True):
    schema: JsonObject
    type: Literal["json_schema"]


class OutputConfigBody(Struct, forbid_unknown_fields=True, kw_only=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormatBody | None = None


class MetadataBody(Struct, forbid_unknown_fields=True, kw_only=True):
    user_id: str | None = None
    """No effect."""


class ToolMark(Struct):
    """A `cache_control` of a tool, of which nothing is used."""

    type: Literal["ephemeral"]


class InputTool(Struct, kw_only=True):
    """Definition of a tool in `tools`. Further fields go to the chat template unchanged."""

    name: str
    input_schema: Raw
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    """True: calls match the schema."""
    cache_control: ToolMark | None = None
    eager_input_streaming: bool | None = None
    """No effect: arguments are always streamed as they come."""
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None


class CountTokensBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Request of /v1/messages/count_tokens. Null means the same as absent."""

    messages: Annotated[list[TurnBody], TURNS]
    model: str | None = None
    system: str | TextBlocks | None = None
    tools: Annotated[Raw, Meta(extra_json_schema={"type": ["array", "null"]})] = field(default_factory=Raw)
    """JSON list of InputTool."""
    tool_choice: ToolUseChoiceBody | None = None
    thinking: ThinkingBody | None = None
    output_config: OutputConfigBody | None = None
    cache_control: CacheControl | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template. Not in Anthropic's API."""


class MessagesBody(CountTokensBody, forbid_unknown_fields=True, kw_only=True):
    """Request of /v1/messages. Null means the same as absent."""

    # Written by python -m runtime.sampling.generate: begin.
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 24)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    # Written by python -m runtime.sampling.generate: end.

    max_tokens: NumTokens
    stream: bool | None = None
    stop_sequences: Annotated[list[StopText], Meta(max_length=16)] | None = None
    metadata: MetadataBody | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    """No effect."""
    priority: Priority | None = None
    """Not in Anthropic's API, nor are `seed` and the next ones."""
    cache_salt: CacheSalt | None = None
    time_limit: TimeLimit | None = None
