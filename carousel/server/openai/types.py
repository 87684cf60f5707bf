"""Bodies of the OpenAI API's requests: their fields, types and bounds.

`carousel.server.request.field_table` handles fields that are not declared here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Raw, Struct, field

from carousel.conversation import MessageBody, TextPart
from carousel.server.guides import GuideFields
from runtime.sampling.kinds import MAX_STOP_CHARS, MAX_WORD_IDS
from runtime.sampling.table import MAX_BIAS, MAX_LOGPROBS, MAX_TOKENS_LIMIT
from runtime.wire.format import MAX_LABEL_CHARS, TURNS, Priority
from runtime.wire.plan import MAX_PROCESSORS
from runtime.wire.retention import MAX_RANGES, RetentionPriority
from runtime.wire.sampling_params import TokenId

MAX_PROMPTS = 1024
MAX_TIME_LIMIT_S = 1_000_000.0

NumTokens: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_TOKENS_LIMIT)]
NumTokensOrNone: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_TOKENS_LIMIT)]
NumLogprobs: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
NumKept: TypeAlias = Annotated[int, Meta(ge=-1, le=MAX_TOKENS_LIMIT)]
StopText: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
BiasValue: TypeAlias = Annotated[float, Meta(ge=-MAX_BIAS, le=MAX_BIAS)]
WordIds: TypeAlias = Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_WORD_IDS)]
CacheSalt: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_LABEL_CHARS)]
TimeLimit: TypeAlias = Annotated[float, Meta(gt=0.0, le=MAX_TIME_LIMIT_S)]
PromptIds: TypeAlias = Annotated[list[TokenId], Meta(min_length=1)]


ReasoningEffort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Duration: TypeAlias = Annotated[int, Meta(ge=1, lt=1 << 31)]


class RetainedRangeBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Retention of prompt tokens from token_start to token_end - 1; a null token_end is the prompt's end."""

    token_start: Annotated[int, Meta(ge=0, lt=1 << 31)]
    token_end: Annotated[int, Meta(ge=1, lt=1 << 31)] | None = None
    priority: RetentionPriority | None = None
    duration_ms: Duration | None = None
    """Milliseconds after the last use; null: no limit."""


class RetentionBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Priority and duration with which pages stay in the KV cache: TensorRT-LLM's KvCacheRetentionConfig."""

    token_range_retention_configs: Annotated[list[RetainedRangeBody], Meta(max_length=MAX_RANGES)] | None = (
        None
    )
    decode_retention_priority: RetentionPriority | None = None
    decode_duration_ms: Duration | None = None
    max_tokens: Annotated[int, Meta(ge=1, lt=1 << 31)] | None = None
    """Short form: number of the prompt's first tokens to keep at the highest priority, without a limit."""


class LogitsProcessorBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Logits processor that --logits-processor has defined."""

    name: Annotated[str, Meta(min_length=1, max_length=MAX_LABEL_CHARS)]
    args: dict[str, Any] | None = None
    """Keyword arguments. The arguments of all processors together are at most 4 KiB of JSON."""


ProcessorNames: TypeAlias = Annotated[list[LogitsProcessorBody], Meta(max_length=MAX_PROCESSORS)]


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """True: each event has the usage so far. Not in OpenAI's API."""
    include_obfuscation: Literal[False] | None = None


class GenerationBody(GuideFields, forbid_unknown_fields=True, kw_only=True):
    """Fields of both completions and chat completions. Null means the same as absent."""

    # Written by python -m runtime.sampling.generate: begin.
    min_tokens: Annotated[int, Meta(ge=0, le=1 << 24)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 24)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: Annotated[dict[str, BiasValue], Meta(max_length=1024)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None
    stop_words_ids: Annotated[list[WordIds], Meta(max_length=64)] | None = None
    bad_words: Annotated[list[StopText], Meta(max_length=64)] | None = None
    bad_words_ids: Annotated[list[WordIds], Meta(max_length=192)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=4096)] | None = None
    no_repeat_ngram_size: Annotated[int, Meta(ge=0, le=64)] | None = None
    top_p_decay: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_p_min: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_p_reset_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=1 << 24)] | None = None
    top_n_sigma: Annotated[float, Meta(ge=0.0, le=1000000.0)] | None = None
    speculative_num_draft_tokens: Annotated[int, Meta(ge=0, le=64)] | None = None
    use_beam_search: bool | None = None
    beam_width: Annotated[int, Meta(ge=1, le=64)] | None = None
    length_penalty: Annotated[float, Meta(ge=-10.0, le=10.0)] | None = None
    early_stopping: bool | int | float | str | None = None
    beam_search_diversity_rate: Annotated[float, Meta(ge=-100.0, le=100.0)] | None = None
    beam_width_array: Annotated[list[Annotated[int, Meta(ge=1, le=64)]], Meta(max_length=8)] | None = None
    # Written by python -m runtime.sampling.generate: end.

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    kv_cache_retention_config: RetentionBody | None = None
    time_limit: TimeLimit | None = None
    """Time limit of the request in seconds."""
    logits_processors: ProcessorNames | None = None
    """Logits processors, in the order in which they are called."""
    return_hidden_states: bool | None = None
    """True: each choice has the last layer's hidden states from which its last token was drawn (SGLang)."""


class CompletionBody(GenerationBody, forbid_unknown_fields=True, kw_only=True):
    prompt: str | list[TokenId | str | PromptIds]
    max_tokens: NumTokensOrNone | None = None
    """Maximum number of output tokens. 0 is allowed with echo: the answer is the prompt and its logprobs."""
    logprobs: NumLogprobs | bool | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


class NamedFunctionBody(Struct, forbid_unknown_fields=True):
    name: str


class AllowedToolBody(Struct, forbid_unknown_fields=True):
    function: NamedFunctionBody
    type: Literal["function"]


class AllowedToolsBody(Struct, forbid_unknown_fields=True):
    """Functions that the model is shown."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedToolBody], Meta(min_length=1, max_length=1024)]


class ToolChoiceBody(Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Function that must be called, or the functions that may be called."""

    type: Literal["function", "allowed_tools"]
    function: NamedFunctionBody | None = None
    allowed_tools: AllowedToolsBody | None = None


Messages: TypeAlias = Annotated[list[MessageBody], TURNS]


class PredictionBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Text that the answer may resemble, used as guesses."""

    content: str | list[TextPart]
    type: Literal["content"]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(GenerationBody, forbid_unknown_fields=True, kw_only=True):
    messages: Messages
    max_tokens: NumTokens | None = None
    max_completion_tokens: NumTokens | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Raw = field(default_factory=Raw)
    """JSON list of tool definitions, passed to the chat template unchanged."""
    tool_choice: Literal["none", "auto", "required"] | ToolChoiceBody | None = None
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool | None = None
    """False leaves reasoning in the text (SGLang's field)."""
    include_reasoning: bool | None = None
    """False leaves reasoning out of the answer (vLLM's field)."""
    reasoning_effort: ReasoningEffort | None = None
    thinking_token_budget: NumTokensOrNone | None = None
    """Maximum number of tokens of reasoning (vLLM's field)."""
    prediction: PredictionBody | None = None
