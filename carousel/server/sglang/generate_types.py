"""Bodies of /generate's requests and answers, with SGLang's names."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType

from carousel.server.openai.types import (
    MAX_PROMPTS,
    BiasValue,
    CacheSalt,
    NumLogprobs,
    ProcessorNames,
    PromptIds,
    RetentionBody,
    StopText,
    TimeLimit,
    WordIds,
)
from runtime.sampling.table import PARAMETERS
from runtime.wire.format import MAX_LABEL_CHARS, Priority
from runtime.wire.sampling_params import SamplingParams, TokenId

SPELLINGS = {p.name: p.sglang for p in PARAMETERS if p.sglang}
"""SGLang's names of those SamplingParams fields that differ."""
PARAM_NAMES = {
    **{name: f"sampling_params.{SPELLINGS.get(name, name)}" for name in SamplingParams.__struct_fields__},
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "logprob_start_len",
    "prompt_logprobs_start": "logprob_start_len",
    "label": "rid",
    "lora_request": "lora_path",
}

AdapterName: TypeAlias = Annotated[str, Meta(max_length=MAX_LABEL_CHARS)]
"""Name of an adapter; empty for none."""
RequestLabel: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_LABEL_CHARS)]


Logits: TypeAlias = list[list[float | None]]
"""Rows [positions, vocabulary]; null for a number that is not finite."""


class GenerateSampling(Struct, forbid_unknown_fields=True, kw_only=True):
    """Sampling parameters with SGLang's names. Null means the same as absent."""

    # Written by python -m runtime.sampling.generate: begin.
    max_new_tokens: Annotated[int, Meta(ge=1, le=1 << 24)] | None = None
    min_new_tokens: Annotated[int, Meta(ge=0, le=1 << 24)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 24)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] | None = None
    sampling_seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None
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
    return_context_logits: bool | None = None
    return_generation_logits: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=1 << 24)] | None = None
    top_n_sigma: Annotated[float, Meta(ge=0.0, le=1000000.0)] | None = None
    speculative_num_draft_tokens: Annotated[int, Meta(ge=0, le=64)] | None = None
    additional_outputs: Annotated[list[StopText], Meta(max_length=16)] | None = None
    gather_context: bool | None = None
    use_beam_search: bool | None = None
    beam_width: Annotated[int, Meta(ge=1, le=64)] | None = None
    length_penalty: Annotated[float, Meta(ge=-10.0, le=10.0)] | None = None
    early_stopping: bool | int | float | str | None = None
    beam_search_diversity_rate: Annotated[float, Meta(ge=-100.0, le=100.0)] | None = None
    beam_width_array: Annotated[list[Annotated[int, Meta(ge=1, le=64)]], Meta(max_length=8)] | None = None
    # Written by python -m runtime.sampling.generate: end.

    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None


class GenerateBody(Struct, forbid_unknown_fields=True, kw_only=True):
    text: str | list[str] | None = None
    input_ids: list[TokenId | PromptIds] | None = None
    sampling_params: GenerateSampling | None = None
    rid: RequestLabel | Annotated[list[RequestLabel], Meta(max_length=MAX_PROMPTS)] | None = None
    """Request id, or one for each prompt."""
    return_logprob: bool | None = None
    logprob_start_len: Annotated[int, Meta(ge=-1)] | None = None
    """Position of the first prompt token with logprobs; -1: logprobs of the output only."""
    top_logprobs_num: NumLogprobs | None = None
    return_text_in_logprobs: bool | None = None
    return_hidden_states: bool | None = None
    """True: the answer has the last layer's hidden states of prompt and output."""
    stream: bool | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    kv_cache_retention_config: RetentionBody | None = None
    lora_path: AdapterName | Annotated[list[AdapterName | None], Meta(max_length=MAX_PROMPTS)] | None = None
    """Name of an adapter, or one for each prompt."""
    time_limit: TimeLimit | None = None
    """Time limit of the request in seconds."""
    logits_processors: ProcessorNames | None = None
    """Logits processors, in the order in which they are called."""


class Logprob(Struct, array_like=True, gc=False):
    logprob: float | None
    """Log-probability; null for the first prompt token that is shown."""
    token_id: int
    text: str | None


class FinishInfo(Struct, omit_defaults=True):
    type: Literal["stop", "length", "timeout", "abort"]
    matched: str | int | UnsetType | None = UNSET
    """Stop string or id that ended a `stop`; null if it was the model's own end token."""
    length: int | UnsetType = UNSET
    """Number of output tokens of a `length`."""
    message: str | UnsetType = UNSET
    """Cause of an `abort`."""


class MetaInfo(Struct):
    """Ids, counts, times and logprobs of an answer. Only a last event has the prompt's usage and the time."""

    id: str
    finish_reason: FinishInfo | None
    completion_tokens: int
    prompt_tokens: int | UnsetType = UNSET
    cached_tokens: int | UnsetType = UNSET
    e2e_latency: float | UnsetType = UNSET
    """Seconds from the request to the end of the sequence."""
    weight_version: str | UnsetType = UNSET
    """Version of the weights that the sequence ended with."""
    spec_verify_ct: int | UnsetType = UNSET
    """Number of steps that gave the sequence tokens, if the server speculates."""
    spec_draft_token_num: int | UnsetType = UNSET
    """Number of guesses that were verified."""
    spec_accept_token_num: int | UnsetType = UNSET
    """Number of guesses that were accepted."""
    score: float | UnsetType = UNSET
    """Score of a beam search's hypothesis."""
    cumulative_logprob: float | UnsetType = UNSET
    """Sum of the hypothesis' logprobs."""
    input_token_logprobs: list[Logprob] | UnsetType = UNSET
    input_top_logprobs: list[list[Logprob] | None] | UnsetType = UNSET
    output_token_logprobs: list[Logprob] | UnsetType = UNSET
    output_top_logprobs: list[list[Logprob]] | UnsetType = UNSET
    hidden_states: list[Logits] | UnsetType = UNSET
    """Hidden states, with return_hidden_states: first a list of the prompt's rows, for the first of its
    sequences, then a list of one row for each output token.
    """


class GenerateResponse(Struct):
    """Answer, or event of a stream, which has all text, ids and logprobs so far, not only new ones."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    context_logits: Logits | UnsetType = UNSET
    """Logits of each prompt token, if requested, for the first sequence of a prompt."""
    generation_logits: Logits | UnsetType = UNSET
    """Logits of each output token, if requested."""
    additional_context_outputs: dict[str, Logits] | UnsetType = UNSET
    """Rows of each prompt token by name, if requested, for the first sequence of a prompt."""
    additional_generation_outputs: dict[str, Logits] | UnsetType = UNSET
    """Rows of each output token except the last by name, if requested."""
    index: int | UnsetType = UNSET
    """Number of the sequence, in a stream of several prompts or sequences."""
