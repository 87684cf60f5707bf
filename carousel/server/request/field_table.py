"""FIELD_TABLES: the fields that each body here accepts or refuses beyond those that it declares.

A field of a body is declared by its type, and has an effect; or accepted, because it changes no answer here;
or refused, because it would change the answer but is unsupported, unless its value is neutral; or unknown. A
null is neutral for every field. `unknown_fields` handles unknown ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from carousel.conversation import TEXT_ONLY, FunctionBody, MessageBody, TextPart, ToolCallBody
from carousel.server.anthropic import refusals as message_refusals
from carousel.server.anthropic.types import (
    BlockBody,
    CacheControl,
    CountTokensBody,
    MessagesBody,
    MetadataBody,
    OutputConfigBody,
    OutputFormatBody,
    TextBlock,
    ThinkingBody,
    ToolUseChoiceBody,
    TurnBody,
)
from carousel.server.guides import JsonSchemaBody, ResponseFormatBody, StructuredOutputsBody
from carousel.server.openai.embedding_types import EmbeddingBody
from carousel.server.openai.types import (
    AllowedToolBody,
    AllowedToolsBody,
    ChatBody,
    CompletionBody,
    LogitsProcessorBody,
    NamedFunctionBody,
    RetainedRangeBody,
    RetentionBody,
    StreamOptions,
    ToolChoiceBody,
)
from carousel.server.request.peer_fields import (
    HINTS,
    NO_CODE,
    REFUSED,
    RENAMED,
    SAMPLING_REFUSED,
    SHARED_HINTS,
    TAKEN,
    Items,
    Object,
)
from carousel.server.responses import refusals
from carousel.server.responses.types import (
    InputItem,
    InputPart,
    ReasoningBody,
    ResponsesBody,
    ResponseStreamOptions,
    TextBody,
    TextFormatBody,
    ToolReference,
    ToolSelection,
)
from carousel.server.sglang.generate_types import GenerateBody, GenerateSampling
from carousel.server.sglang.tokenize_types import DetokenizeBody, TokenizeBody
from carousel.server.vectors.scoring_types import RerankBody, ScoreBody
from runtime.base.errors import InvalidRequest
from runtime.sampling.table import PARAMETERS
from runtime.wire.sampling_params import SamplingParams

MAX_NEUTRAL_BYTES = 1 << 10
"""More bytes than any neutral value has."""

NeutralValues: TypeAlias = Mapping[str, tuple[Any, ...]]
"""Neutral values besides null, by the field's name."""

MESSAGE_REFUSED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": (),
    "partial": (False,),
    "prefix": (False,),
    "tools": ([],),
}
PART_REFUSED = dict.fromkeys(
    (
        *("image", "image_url", "image_pil", "image_embeds", "input_audio", "audio_url", "audio_embeds"),
        *("video", "video_url", "file"),
    ),
    (),
)
INPUT_PART_REFUSED = dict.fromkeys(
    (*PART_REFUSED, "detail", "file_data", "file_id", "file_url", "filename"), ()
)
EXAMPLES = {
    "kv_cache_retention_config": '{"max_tokens": 1024}',
    "logits_processors": f'[{{"name": "NAME", "args": {{}}}}]; {NO_CODE}',
    "messages": '[{"role": "user", "content": "TEXT"}]',
    "output_config": '{"effort": "low"}',
    "thinking": '{"type": "enabled", "budget_tokens": 1024}',
    "prediction": '{"type": "content", "content": "TEXT"}',
    "response_format": '{"type": "json_object"}',
    "sampling_params": '{"max_new_tokens": 32}, one for all prompts',
    "stream_options": '{"include_usage": true}',
    "structured_outputs": '{"regex": "[0-9]+"}',
    "tool_choice": '"auto" or {"type": "function", "function": {"name": "NAME"}}',
}
"""Examples of values of fields that hold objects, for errors."""


@dataclass(frozen=True, slots=True)
class FieldTable:
    """Fields of one type of body, or of an object in one, beyond those that it declares."""

    taken: Mapping[str, Any] = field(default_factory=dict)
    """Types of the fields without effect."""
    refused: NeutralValues = field(default_factory=dict)
    hints: Mapping[str, str] = field(default_factory=dict)
    elsewhere: frozenset[str] = frozenset()
    """Names of fields with an effect in other bodies, which would change the answer of this one, too. They
    are refused.
    """
    nested: Mapping[str, type] = field(default_factory=dict)
    """Types of the objects in a field, or in a list in it."""


def _names(*kinds: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(name for kind in kinds for name in kind.__struct_fields__)


_GENERATING = _names(
    *(CompletionBody, ChatBody, ResponsesBody, GenerateBody, GenerateSampling, SamplingParams)
)
_GENERATE_HINTS = (
    SHARED_HINTS
    | {name: f"it is sampling_params.{name} here" for name in GenerateSampling.__struct_fields__}
    | {
        name: f"it is sampling_params.{p.sglang or p.name} here"
        for p in PARAMETERS
        for name in (p.name, *p.aliases)
        if "sglang" in p.bodies and (p.sglang in RENAMED or name != p.name)
    }
    | {
        "max_completion_tokens": "it is sampling_params.max_new_tokens here",
        "max_output_tokens": "it is sampling_params.max_new_tokens here",
        "request_output_len": "it is sampling_params.max_new_tokens here",
        "prompt_token_ids": "it is called input_ids here",
        "return_log_probs": "it is called return_logprob here",
        "prompt": "it is called text here",
        "messages": "send it to /v1/chat/completions",
        "logprobs": "it is called return_logprob here",
        "top_logprobs": "it is called top_logprobs_num here",
    }
)
_RETENTION = {"kv_cache_retention_config": RetentionBody}
_PROCESSORS = {"logits_processors": LogitsProcessorBody}
_GUIDES = {"response_format": ResponseFormatBody, "structured_outputs": StructuredOutputsBody}
_OPENAI = FieldTable(
    TAKEN,
    REFUSED,
    HINTS,
    _GENERATING,
    {"stream_options": StreamOptions, **_RETENTION, **_GUIDES, **_PROCESSORS},
)
_CONVERSATION = {"messages": MessageBody}
_MARKED = {"cache_control": CacheControl}
_MESSAGES = FieldTable(
    {"betas": Items},
    {**REFUSED, **message_refusals.MESSAGES_REFUSED},
    {**HINTS, **message_refusals.MESSAGES_HINTS},
    _GENERATING,
    {
        **_MARKED,
        "messages": TurnBody,
        "metadata": MetadataBody,
        "output_config": OutputConfigBody,
        "system": TextBlock,
        "thinking": ThinkingBody,
        "tool_choice": ToolUseChoiceBody,
    },
)

FIELD_TABLES: dict[type, FieldTable] = {
    CompletionBody: _OPENAI,
    ChatBody: FieldTable(
        TAKEN, REFUSED, HINTS, _GENERATING, {**_OPENAI.nested, **_CONVERSATION, "tool_choice": ToolChoiceBody}
    ),
    ResponsesBody: FieldTable(
        {name: kind for name, kind in TAKEN.items() if name not in refusals.RESPONSES_REFUSED}
        | {"client_metadata": Object},
        {**REFUSED, **refusals.RESPONSES_REFUSED},
        {**HINTS, **refusals.RESPONSES_HINTS},
        _GENERATING,
        {
            **_OPENAI.nested,
            "input": InputItem,
            "text": TextBody,
            "tool_choice": ToolSelection,
            "reasoning": ReasoningBody,
            "stream_options": ResponseStreamOptions,
        },
    ),
    InputItem: FieldTable(
        {"id": str, "status": str, "phase": str, "parsed_arguments": msgspec.Raw},
        refusals.ITEM_REFUSED,
        refusals.ITEM_HINTS,
        nested=dict.fromkeys(("content", "output", "summary"), InputPart),
    ),
    InputPart: FieldTable(
        {"annotations": Items, "logprobs": Items, "parsed": msgspec.Raw, "prompt_cache_breakpoint": Object},
        INPUT_PART_REFUSED,
        dict.fromkeys(INPUT_PART_REFUSED, TEXT_ONLY),
    ),
    TextBody: FieldTable(nested={"format": TextFormatBody}),
    TextFormatBody: FieldTable(),
    ReasoningBody: FieldTable({}, refusals.REASONING_REFUSED, refusals.REASONING_HINTS),
    ToolSelection: FieldTable(nested={"tools": ToolReference}),
    ToolReference: FieldTable(),
    ResponseStreamOptions: FieldTable({"include_usage": bool}, {"continuous_usage_stats": (False,)}),
    GenerateBody: FieldTable(
        TAKEN,
        {**REFUSED, "add_special_tokens": (True,)},
        _GENERATE_HINTS,
        _GENERATING,
        {"sampling_params": GenerateSampling, **_RETENTION, **_PROCESSORS},
    ),
    MessagesBody: _MESSAGES,
    CountTokensBody: _MESSAGES,
    TurnBody: FieldTable(nested={"content": BlockBody}),
    BlockBody: FieldTable(
        {},
        message_refusals.BLOCK_REFUSED,
        dict.fromkeys(("source", "data"), TEXT_ONLY),
        nested={**_MARKED, "content": TextBlock},
    ),
    TextBlock: FieldTable(
        {}, message_refusals.BLOCK_REFUSED, dict.fromkeys(("source", "data"), TEXT_ONLY), nested={**_MARKED}
    ),
    CacheControl: FieldTable({"scope": str}),
    MetadataBody: FieldTable(),
    OutputConfigBody: FieldTable(
        refused={"task_budget": ()},
        hints={"task_budget": "max_tokens limits an answer"},
        nested={"format": OutputFormatBody},
    ),
    OutputFormatBody: FieldTable(),
    ThinkingBody: FieldTable(),
    ToolUseChoiceBody: FieldTable(),
    # Nothing is generated, so fields about generation have no effect.
    EmbeddingBody: FieldTable(TAKEN, REFUSED, HINTS),
    ScoreBody: FieldTable(TAKEN, REFUSED, HINTS),
    RerankBody: FieldTable(TAKEN, REFUSED, HINTS),
    TokenizeBody: FieldTable(TAKEN, REFUSED, HINTS, nested=_CONVERSATION),
    DetokenizeBody: FieldTable(TAKEN, REFUSED, HINTS),
    StreamOptions: FieldTable(),
    ResponseFormatBody: FieldTable(nested={"json_schema": JsonSchemaBody}),
    JsonSchemaBody: FieldTable(),
    StructuredOutputsBody: FieldTable(
        {"disable_fallback": bool},
        {"whitespace_pattern": (), "disable_additional_properties": (False,)},
    ),
    RetentionBody: FieldTable(nested={"token_range_retention_configs": RetainedRangeBody}),
    RetainedRangeBody: FieldTable(),
    LogitsProcessorBody: FieldTable(
        refused={"qualname": (), "kwargs": ()},
        hints={
            "qualname": "code never comes in a request: name a processor of the launch as name",
            "kwargs": "they are called args here",
        },
    ),
    GenerateSampling: FieldTable(
        {name: TAKEN[name] for name in ("arrival_time", "label", "pad_id")},
        SAMPLING_REFUSED,
        {
            **{name: hint.replace("sampling_params.", "called ") for name, hint in _GENERATE_HINTS.items()},
            **{name: f"send it as {name}, beside sampling_params" for name in GenerateBody.__struct_fields__},
            "stream_interval": "the launch chooses it, with --stream-interval",
        },
        _GENERATING,
    ),
    MessageBody: FieldTable(
        {"annotations": Items, "cache_control": Object, "refusal": str},
        MESSAGE_REFUSED,
        {"function_call": "send it as the function of one of tool_calls"},
        nested={"content": TextPart, "tool_calls": ToolCallBody},
    ),
    TextPart: FieldTable({"cache_control": Object}, PART_REFUSED, dict.fromkeys(PART_REFUSED, TEXT_ONLY)),
    ToolCallBody: FieldTable(nested={"function": FunctionBody}),
    ToolChoiceBody: FieldTable(nested={"function": NamedFunctionBody, "allowed_tools": AllowedToolsBody}),
    AllowedToolsBody: FieldTable(nested={"tools": AllowedToolBody}),
    AllowedToolBody: FieldTable(nested={"function": NamedFunctionBody}),
    NamedFunctionBody: FieldTable(),
    FunctionBody: FieldTable(),
}


def check_taken(name: str, value: bytes, kind: Any, where: str) -> None:
    """Check a field without effect. Raises InvalidRequest for a value of a wrong type."""
    try:
        msgspec.json.decode(value, type=kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{where}{name}: {error}", param=f"{where}{name}") from None


def check_refused(name: str, value: bytes, neutral: tuple[Any, ...], hint: str, where: str) -> None:
    """Check an unsupported field. Raises InvalidRequest for a value that is not neutral."""
    if len(value) <= MAX_NEUTRAL_BYTES:
        given = msgspec.json.decode(value)
        # True == 1 to Python, but `n: true` is a mistake.
        if any(given == each and type(given) is type(each) for each in neutral):
            return
    spelled = " or ".join(msgspec.json.encode(each).decode() for each in neutral)
    exception = f", except as {spelled}" if neutral else ""
    raise InvalidRequest(
        f"{where}{name} is not supported by this server{exception}" + (f"; {hint}" if hint else ""),
        param=f"{where}{name}",
        code="unsupported_parameter",
    )


def described_fields(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the JSON Schemas of fields that the type does not declare, by their names."""
    table = FIELD_TABLES[kind]
    json_types = {str: "string", bool: "boolean", int: "integer", float: "number"}
    fields: dict[str, Any] = {
        name: {"type": [json_types.get(each, "array" if each is Items else "object"), "null"]}
        for name, each in table.taken.items()
    }
    fields |= {name: {"enum": [None, *neutral]} for name, neutral in table.refused.items()}
    return {name: schema for name, schema in fields.items() if name not in kind.__struct_fields__}
