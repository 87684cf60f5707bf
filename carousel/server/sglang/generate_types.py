"""The bodies of /generate, as SGLang spells them: what a request may hold, and what an answer holds."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType

from carousel.server.openai.types import (
    MAX_PROMPTS,
    BiasValue,
    CacheSalt,
    NumLogprobs,
    Priority,
    ProcessorNames,
    PromptIds,
    RetentionBody,
    StopText,
    TimeLimit,
    WordIds,
)
from runtime.sampling.table import PARAMETERS
from runtime.wire.format import MAX_LABEL_CHARS
from runtime.wire.sampling_params import SamplingParams, TokenId

SPELLINGS = {p.name: p.sglang for p in PARAMETERS if p.sglang}
"""Fields of SamplingParams that go by another name here."""
PARAM_NAMES = {
    **{name: f"sampling_params.{SPELLINGS.get(name, name)}" for name in SamplingParams.__struct_fields__},
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "logprob_start_len",
    "prompt_logprobs_start": "logprob_start_len",
    "label": "rid",
    "lora_request": "lora_path",
}

AdapterName: TypeAlias = Annotated[str, Meta(max_length=MAX_LABEL_CHARS)]
"""Empty for none."""
RequestLabel: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_LABEL_CHARS)]


Logits: TypeAlias = list[list[float | None]]
"""A row for each position, a number for each id of the vocabulary; null for one that is not finite."""


class GenerateSampling(Struct, forbid_unknown_fields=True, kw_only=True):
    """Null is the same as absent."""

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
    """One, or one for each prompt."""
    return_logprob: bool | None = None
    logprob_start_len: Annotated[int, Meta(ge=-1)] | None = None
    """The first token of the prompt to give logprobs of; -1: none, those of the output only."""
    top_logprobs_num: NumLogprobs | None = None
    return_text_in_logprobs: bool | None = None
    return_hidden_states: bool | None = None
    """Those of the last layer, as the additional output hidden_states, of prompt and output."""
    stream: bool | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    kv_cache_retention_config: RetentionBody | None = None
    lora_path: AdapterName | Annotated[list[AdapterName | None], Meta(max_length=MAX_PROMPTS)] | None = None
    """Name of an adapter; one, or one for each prompt."""
    time_limit: TimeLimit | None = None
    """Seconds."""
    logits_processors: ProcessorNames | None = None
    """Called in this order."""


class Logprob(Struct, array_like=True, gc=False):
    logprob: float | None
    """Null for the first token of the prompt that is shown."""
    token_id: int
    text: str | None


class FinishInfo(Struct, omit_defaults=True):
    type: Literal["stop", "length", "timeout", "abort"]
    matched: str | int | UnsetType | None = UNSET
    """For a stop: the stop string or id; null where the model ended by its own end token."""
    length: int | UnsetType = UNSET
    """For a length: the tokens that came."""
    message: str | UnsetType = UNSET
    """For an abort: who asked for it."""


class MetaInfo(Struct):
    """The usage of the prompt and the time are known at the end; the events before it are without them."""

    id: str
    finish_reason: FinishInfo | None
    completion_tokens: int
    prompt_tokens: int | UnsetType = UNSET
    cached_tokens: int | UnsetType = UNSET
    e2e_latency: float | UnsetType = UNSET
    """Seconds."""
    spec_verify_ct: int | UnsetType = UNSET
    """Steps that gave it tokens, where the server speculates; all of them verify what there is to verify."""
    spec_draft_token_num: int | UnsetType = UNSET
    """Guesses that were verified."""
    spec_accept_token_num: int | UnsetType = UNSET
    """Guesses that were right."""
    score: float | UnsetType = UNSET
    """Score of a hypothesis of a beam search."""
    cumulative_logprob: float | UnsetType = UNSET
    """Sum of its logprobs."""
    input_token_logprobs: list[Logprob] | UnsetType = UNSET
    input_top_logprobs: list[list[Logprob] | None] | UnsetType = UNSET
    output_token_logprobs: list[Logprob] | UnsetType = UNSET
    output_top_logprobs: list[list[Logprob]] | UnsetType = UNSET
    hidden_states: list[Logits] | UnsetType = UNSET
    """With return_hidden_states: first the rows of the prompt, with the first of its sequences, then each row
    of the output by itself.
    """


class GenerateResponse(Struct):
    """Also each event of a stream: text, ids and logprobs are all there are so far, not what is new."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    context_logits: Logits | UnsetType = UNSET
    """Logits at each token of the prompt, when asked for, with the first of its sequences."""
    generation_logits: Logits | UnsetType = UNSET
    """Logits of each output token, when asked for."""
    additional_context_outputs: dict[str, Logits] | UnsetType = UNSET
    """By name a row for each token of the prompt, when asked for, with the first of its sequences."""
    additional_generation_outputs: dict[str, Logits] | UnsetType = UNSET
    """By name a row for each output token but the last, when asked for."""
    index: int | UnsetType = UNSET
    """In a stream over several prompts or sequences: whose event it is."""
