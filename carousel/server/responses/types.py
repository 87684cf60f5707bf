"""Bodies of the requests to /v1/responses, with their bounds, and of the answers.

The fields of sampling and guides are those of the other OpenAI bodies. `field_table` handles fields that are
not declared here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, defstruct, field

from carousel.server.guides import SchemaBody
from carousel.server.openai.types import GenerationBody, NumLogprobs, NumTokens, ReasoningEffort
from runtime.sampling.table import PARAMETERS
from runtime.wire.format import TURNS

# -- requests ------------------------------------------------------------------------------------------------

ItemType: TypeAlias = Literal[
    "message",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "reasoning",
    "item_reference",
]
PartType: TypeAlias = Literal[
    "input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"
]
ToolMode: TypeAlias = Literal["none", "auto", "required"]
LOGPROBS = "message.output_text.logprobs"
Include: TypeAlias = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.results",
    "web_search_call.action.sources",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
]
MAX_INCLUDED = 32
MAX_METADATA = 16
MAX_CALLS = 1 << 31
MetadataKey: TypeAlias = Annotated[str, Meta(max_length=64)]
MetadataValue: TypeAlias = Annotated[str, Meta(max_length=512)]
ToolText: TypeAlias = Annotated[str, Meta(max_length=256)]


class InputPart(Struct, forbid_unknown_fields=True, kw_only=True):
    """Part of a message, of a result or of reasoning."""

    type: PartType
    text: str = ""
    refusal: str = ""
    """Text of a part of the type `refusal`."""


class InputItem(Struct, forbid_unknown_fields=True, kw_only=True):
    """Item of the conversation. Each type has some of the fields."""

    type: ItemType | None = None
    """Without one it is a message."""
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    """Namespace of the tool that is called."""
    arguments: str | None = None
    """JSON of the arguments of a call."""
    input: str | None = None
    """Text that a tool of free text is called with."""
    output: str | list[InputPart] | None = None


class TextFormatBody(Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    """No effect: output always follows the schema."""
    schema: SchemaBody = field(default_factory=Raw)


class TextBody(Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    format: TextFormatBody | None = None
    verbosity: ToolText | None = None
    """No effect."""


class ReasoningBody(Struct, forbid_unknown_fields=True, kw_only=True):
    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """No effect: the reasoning itself is in the answer."""


class ToolReference(Struct, forbid_unknown_fields=True):
    type: Literal["function", "custom"]
    name: ToolText
    namespace: ToolText | None = None


class ToolSelection(Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool that must be called, or the tools that may be called."""

    type: Literal["function", "custom", "allowed_tools"]
    name: ToolText | None = None
    namespace: ToolText | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[ToolReference], Meta(max_length=1024)] | None = None


class ResponseStreamOptions(Struct, forbid_unknown_fields=True):
    include_obfuscation: Literal[False] | None = None


class ResponsesBody(GenerationBody, forbid_unknown_fields=True, kw_only=True):
    input: str | Annotated[list[InputItem], TURNS]
    instructions: str | None = None
    """Text of a system message before all others."""
    max_output_tokens: NumTokens | None = None
    top_logprobs: NumLogprobs | None = None
    include: Annotated[list[Include], Meta(max_length=MAX_INCLUDED)] | None = None
    text: TextBody | None = None
    tools: Raw = field(default_factory=Raw)
    """JSON list of tool definitions."""
    tool_choice: ToolMode | ToolSelection | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int, Meta(ge=1, lt=MAX_CALLS)] | None = None
    """Shown in the answer. It limits tool calls that OpenAI runs, of which there are none here."""
    reasoning: ReasoningBody | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    stream_options: ResponseStreamOptions | None = None  # type: ignore[assignment]
    metadata: Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=MAX_METADATA)] | None = None
    """Shown in the answer, as are the next three."""
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


# -- answers -------------------------------------------------------------------------------------------------

ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]
RawList: TypeAlias = Annotated[Raw, Meta(extra_json_schema={"type": "array"})]
ResponseStatus: TypeAlias = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]


def empty_list() -> Raw:
    return Raw(b"[]")


class TopTokenLogprob(Struct, gc=False):
    token: str
    bytes: list[int]
    logprob: float


class OutputLogprob(Struct, gc=False):
    token: str
    bytes: list[int]
    """Bytes of the token; empty where they depend on the tokens beside it."""
    logprob: float
    top_logprobs: list[TopTokenLogprob]


class OutputText(Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = field(default_factory=list)
    logprobs: RawList = field(default_factory=empty_list)
    """List of OutputLogprob."""


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    text: str


class OutputMessage(Struct, tag_field="type", tag="message", kw_only=True):
    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningItem(Struct, tag_field="type", tag="reasoning", kw_only=True):
    id: str
    status: ItemStatus
    summary: list[Any] = field(default_factory=list)
    content: list[ReasoningText]
    encrypted_content: None = None


class FunctionCallItem(Struct, tag_field="type", tag="function_call", kw_only=True):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str
    """Arguments as JSON text."""


class CustomToolCallItem(Struct, tag_field="type", tag="custom_tool_call", kw_only=True):
    id: str
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    input: str


OutputItem: TypeAlias = OutputMessage | ReasoningItem | FunctionCallItem | CustomToolCallItem


class InputDetails(Struct):
    cached_tokens: int
    cache_write_tokens: int = 0
    """Not counted: writing to the cache costs nothing here."""


class OutputDetails(Struct):
    reasoning_tokens: int


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(Struct):
    code: Literal["server_error", "rate_limit_exceeded"]
    message: str


class IncompleteDetails(Struct):
    reason: Literal["max_output_tokens"]


class ReasoningShown(Struct):
    effort: str | None
    summary: str | None


SHOWN_PARAMETERS = tuple(parameter.name for parameter in PARAMETERS if parameter.is_shown)
_ShownSampling: Any = defstruct("_ShownSampling", [(name, float) for name in SHOWN_PARAMETERS], kw_only=True)


class ResponseBody(_ShownSampling, kw_only=True):  # type: ignore[misc, call-arg]
    """Answer to a request, whose settings it repeats."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: ResponseStatus
    completed_at: int | None = None
    background: Literal[False] = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem] = field(default_factory=list)
    parallel_tool_calls: bool
    previous_response_id: None = None
    prompt_cache_key: str | None
    reasoning: ReasoningShown
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: Literal[False] = False
    text: dict[str, Any]
    tool_choice: Annotated[Any, Meta(extra_json_schema={"type": ["string", "object"]})]
    tools: RawList
    top_logprobs: int
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]
