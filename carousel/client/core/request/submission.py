"""Submission: a request as its caller writes it, with the forms of a prompt and the options that it may have.

Nothing is checked here but what divides several prompts into requests of one each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from carousel.conversation import Conversation, Tools
from carousel.lora import LoraConfig, LoRARequest
from carousel.prompt_tables import PromptAdapterRequest, PromptTuningConfig
from carousel.retention import KvCacheRetentionConfig
from carousel.structured_outputs import GuidedDecodingParams, StructuredOutputsParams
from runtime.base.errors import InvalidRequest
from runtime.ring.tenants import OWNER
from runtime.wire.guide import Guide
from runtime.wire.messages import Task
from runtime.wire.sampling_params import SamplingParams

TokenIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]
Prompt: TypeAlias = str | TokenIds | Conversation
"""Prompt as text, token ids, or chat messages as {"role": ..., "content": ...}; of earlier turns also
`tool_calls`, `tool_call_id` and `reasoning_content`, for templates that show them. Content is a text or a
list of parts, {"type": "text", "text": ...}, each of which becomes lines of its own.
"""
Prompts: TypeAlias = list[str] | list[list[int]] | list[list[dict[str, Any]]]
"""Several prompts of one form, as types that a type checker can distinguish from a single prompt."""


class EmbedOptions(TypedDict, total=False):
    """Keyword arguments of every embedding call."""

    priority: int
    """Priority from -1000 to 1000; higher is served first."""
    cache_salt: str
    """Text that separates prefixes: requests with different salts never share cached ones."""
    label: str
    """The caller's own id, returned in the completion. Refused while another request of this client has it.
    """
    add_special_tokens: bool
    """True to let the tokenizer add its begin-of-text token to a text prompt."""
    time_limit: float | None
    """Seconds that the server may take. The request then ends with the output so far and finish_reason
    "timeout".
    """
    arrival_time: float | None
    """Time at which the caller asked, in seconds since 1970, for the server's statistics; default: now."""


class RequestOptions(EmbedOptions, total=False):
    """Keyword arguments of every generating call."""

    add_generation_prompt: bool | None
    """True to end a conversation's prompt with the header of the assistant's turn. This is the default unless
    its last message is to be continued.
    """
    continue_final_message: bool
    """True if the last message of a conversation is the beginning of the answer."""
    chat_template_kwargs: Mapping[str, Any] | None
    """Further variables of a conversation's chat template, JSON-like."""
    tools: Tools | None
    """Definitions of tools that the chat template of a conversation shows, a list or its JSON."""
    task: Task
    """Task of the request; set by the embedding calls."""
    kv_cache_retention_config: KvCacheRetentionConfig | None
    """Wish for how firmly and how long the server keeps the KV cache for requests with the same beginning."""
    structured_outputs: StructuredOutputsParams | GuidedDecodingParams | Guide | None
    """Form that the output must have."""
    draft_token_ids: TokenIds | None
    """Guesses at the beginning of the output, at most 64. Right ones are produced together in one step."""
    prediction: str
    """Text that the output may resemble. With speculation, the server looks for guesses in it first."""
    traceparent: str | None
    """Trace context of the caller's span (W3C). If it is sampled, each sequence ends with its `trace_stamps`.
    """
    lora_request: LoRARequest | Sequence[LoRARequest | None] | None
    """Adapter of the request; None: the base model. For several prompts also a sequence with one for each."""
    lora_config: LoraConfig | None
    """Adapter without a directory. Its weights come with the first request that names it."""
    prompt_adapter_request: PromptAdapterRequest | None
    """Prompt adapter, whose virtual tokens come before the prompt."""
    prompt_tuning_config: PromptTuningConfig | None
    """Virtual tokens that come with the request. The prompt's ids say where they are."""
    logits_processors: Sequence[Mapping[str, Any]] | None
    """Logits processors of the launch, in the order of their calls, each as {"name": ..., "args": {...}}."""


OTHERS_OPTIONS = frozenset(("disaggregated_params", "scheduling_params", "tokenization_kwargs"))
"""Arguments of generate in vLLM and TensorRT-LLM that ask for nothing if they are None."""


class Submission(Struct, frozen=True):
    """A request as its caller wrote it. `build_request` checks it."""

    prompt: Prompt
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stream: bool = False
    options: RequestOptions = field(default_factory=RequestOptions)
    tenant: str = OWNER
    """Name of the tenant whose request it is."""
    is_cumulative: bool = False
    """True if the caller takes from a stream all output so far, instead of new output only."""
    holds_label: bool = False
    """True if the caller itself holds the label in the session's book, longer than the request takes."""

    @property
    def label(self) -> str:
        label = self.options.get("label")
        return "" if label is None else label

    @property
    def num_sequences(self) -> int:
        """Number of sequences that are generated, including those that `best_of` does not choose; 1 if the
        parameters are invalid.
        """
        sampling = self.sampling
        wanted: Any = sampling.n if sampling.use_beam_search else sampling.best_of or sampling.n
        return wanted if isinstance(wanted, int) else 1


def is_single_prompt(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Return True for one prompt in any form, False for a sequence of prompts."""
    if isinstance(prompts, np.ndarray):
        return prompts.ndim == 1
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence):
        return True  # anything that is no prompt is refused as one prompt
    return len(prompts) > 0 and isinstance(prompts[0], int | np.integer | Mapping)


def one_per_prompt(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams]:
    """Return sampling parameters for each prompt, from one for all or a sequence. Raises InvalidRequest if it
    is neither, or its length differs from the number of prompts.
    """
    if sampling_params is None:
        sampling_params = SamplingParams()
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * num_prompts
    several = sampling_params if isinstance(sampling_params, Sequence) else [sampling_params]
    for each in several:
        if not isinstance(each, SamplingParams):
            raise InvalidRequest(
                f"sampling_params must be SamplingParams or several, got {type(each).__name__}",
                param="sampling_params",
            )
    if len(sampling_params) != num_prompts:
        raise InvalidRequest(
            f"sampling_params: {len(sampling_params)} for {num_prompts} prompts; give one, or one for each",
            param="sampling_params",
        )
    return sampling_params


def options_per_prompt(options: RequestOptions, num_prompts: int) -> Sequence[RequestOptions]:
    """Return options for each prompt; `lora_request` may be one adapter for all or a sequence. Raises
    InvalidRequest if its length differs from the number of prompts.
    """
    adapters = options.get("lora_request")
    if not isinstance(adapters, Sequence) or isinstance(adapters, str | bytes):
        return [options] * num_prompts  # anything that is no adapter is refused as one adapter
    if len(adapters) != num_prompts:
        raise InvalidRequest(
            f"lora_request: {len(adapters)} for {num_prompts} prompts; give one, or one for each",
            param="lora_request",
        )
    return [RequestOptions({**options, "lora_request": adapter}) for adapter in adapters]
