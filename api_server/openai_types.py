"""The bodies of the OpenAI API: what a request may hold, field by field, and what a response holds.

A field that is not declared is refused by name. One that is declared but not built is accepted in its neutral
spellings only (`NEUTRAL`), because client libraries send those unasked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from runtime.errors import InvalidRequest
from runtime.sampling_params import MAX_LOGPROBS, MAX_TOKENS_LIMIT
from runtime.wire import TURNS

ANY_TEXT = object()
"""In NEUTRAL: any string is fine; the field is a label for the operator and asks for nothing."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "response_format": (None, {"type": "text"}),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "reasoning_effort": (None, "none"),
    "verbosity": (None,),
    "web_search_options": (None,),
    "store": (None, False),
    "metadata": (None, {}),
    "service_tier": (None, "auto", "default"),
    "prompt_cache_key": (None, ""),
    "user": (None, ANY_TEXT),
    "safety_identifier": (None, ANY_TEXT),
    "refusal": (None,),
    "annotations": (None, []),
    "tool_calls": (None, []),
}


def refuse_unsupported(
    body: Struct, where: str = "", neutral_values: Mapping[str, tuple[Any, ...]] = NEUTRAL
) -> None:
    """Raises InvalidRequest for the first field that asks for something that is not built."""
    for name in body.__struct_fields__:
        accepted = neutral_values.get(name)
        if accepted is None:
            continue
        value = getattr(body, name)
        if isinstance(value, str) and ANY_TEXT in accepted:
            continue
        # True == 1 to Python, but `n: true` is a mistake.
        if not any(value == neutral and type(value) is type(neutral) for neutral in accepted):
            raise InvalidRequest(
                f"{where}{name} is not supported by this server, except as {_spell(accepted)}",
                param=f"{where}{name}",
                code="unsupported_parameter",
            )


def _spell(accepted: tuple[Any, ...]) -> str:
    return " or ".join(_spell_one(value) for value in accepted)


def _spell_one(value: Any) -> str:
    return "a string" if value is ANY_TEXT else msgspec.json.encode(value).decode()


# -- requests ------------------------------------------------------------------------------------------------


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class GenerationBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """What both kinds of request share. Null is the same as absent."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    # Beyond OpenAI, as other servers spell them.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None

    n: Any = None
    metadata: Any = None
    prompt_cache_key: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    user: Any = None


class CompletionBody(GenerationBody, forbid_unknown_fields=True, kw_only=True):
    prompt: str | list[int | str | list[int]]
    logprobs: int | bool | None = None
    add_special_tokens: bool | None = None

    best_of: Any = None
    echo: Any = None
    suffix: Any = None


class TextPart(Struct, forbid_unknown_fields=True):
    text: str
    type: Literal["text"]


class MessageBody(Struct, forbid_unknown_fields=True, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None

    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None
    tool_calls: Any = None


class ChatBody(GenerationBody, forbid_unknown_fields=True, kw_only=True):
    messages: Annotated[list[MessageBody], TURNS]
    # Bounded here, because SamplingParams would complain by another name.
    max_completion_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS_LIMIT)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None

    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    parallel_tool_calls: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    response_format: Any = None
    tool_choice: Any = None
    tools: Any = None
    verbosity: Any = None
    web_search_options: Any = None


# -- responses -----------------------------------------------------------------------------------------------


class PromptTokensDetails(Struct):
    cached_tokens: int


class UsageBody(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(Struct):
    """Columns, one entry for each output token."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    matched_stop: str | int | None


class CompletionResponse(Struct):
    """Also each event of a stream; `usage` is left out of those unless it was asked for."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody | UnsetType | None = UNSET


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class ChatMessageBody(Struct):
    role: Literal["assistant"]
    content: str
    refusal: None = None


class ChatChoice(Struct):
    index: int
    message: ChatMessageBody
    logprobs: ChatLogprobs | None
    finish_reason: str
    matched_stop: str | int | None


class ChatResponse(Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody


class ChatDelta(Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    matched_stop: str | int | None = None


class ChatChunk(Struct):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageBody | UnsetType | None = UNSET


class ModelCard(Struct):
    id: str
    created: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "carousel"


class ModelList(Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"
