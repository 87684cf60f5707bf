"""GenerationRequest: a request to GenerationExecutor, in TensorRT-LLM's words. Unsupported arguments are
refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, get_args

import msgspec

from carousel.client.core.request.request_builder import MAX_TIME_LIMIT_S, build_request, pack_token_ids
from carousel.client.core.request.submission import RequestOptions, Submission, TokenIds
from carousel.client.core.result import respelled, respelling
from carousel.lora import LoraConfig, LoRARequest
from carousel.prompt_tables import PromptAdapterRequest, PromptTuningConfig
from carousel.retention import KvCacheRetentionConfig
from carousel.structured_outputs import GuidedDecodingParams, StructuredOutputsParams
from carousel.trtllm.executor_config import (
    DRAFTS,
    AdditionalModelOutput,
    ExternalDraftTokensConfig,
    checked_outputs,
)
from runtime.base.errors import CarouselError, InvalidRequest, RequestError
from runtime.wire.format import MAX_PRIORITY
from runtime.wire.guide import GuideKind
from runtime.wire.plan import PROCESSORS
from runtime.wire.sampling_params import SamplingParams

NOT_BUILT = frozenset(
    {
        "disaggregated_params",
        "logits_processor",
        "multimodal_params",
    }
)
"""Arguments of TensorRT-LLM's executor that would have no effect here."""
MAX_UINT64 = (1 << 64) - 1
_NAMES = {
    "prompt": "prompt_token_ids",
    "stream": "streaming",
    "time_limit": "allotted_time_ms",
    "draft_token_ids": f"{DRAFTS}.tokens",
    "structured_outputs": "guided_decoding_params",
    **dict.fromkeys(get_args(GuideKind), "guided_decoding_params"),
    **dict.fromkeys((PROCESSORS, f"{PROCESSORS}[0]", f"{PROCESSORS}[0].name"), "logits_post_processor_name"),
}
"""Names of arguments that differ in the client library and the runtime."""
_OUTPUT_NAMES = dict.fromkeys(("additional_outputs", "gather_context"), "additional_model_outputs")


class GenerationRequest:
    """Request of one prompt. `n` of `sampling_params` is how many sequences are returned, `best_of` how many
    are generated for the choice.

    max_tokens: takes precedence over that of `sampling_params`. Without it and without sampling parameters,
    the limit is the end of the context.

    query_token_ids: appended to the prompt. A separate argument, so that a prompt shared by many queries is
    written once.

    priority: an integer, higher first, as everywhere in the client library; or TensorRT-LLM's float from 0.0
    to 1.0, where 0.5 is normal.

    client_id: any 64-bit number, returned with each Response. It need not be unique.

    arrival_time: seconds since 1970, for the statistics of waiting; default: the time of submission.

    allotted_time_ms: time limit, after which the request ends with its output so far and finish_reason
    "timeout".

    return_all_generated_tokens: each Response of a stream holds all ids so far, not only the new ones. Those
    of a beam search always do.

    kv_cache_retention_config: how firmly, and for how long, its pages stay in the KV cache.

    guided_decoding_params: guide that the output must match.

    external_draft_tokens_config: guesses at the beginning of the output, for each of its sequences.

    lora_request: adapter to use.

    lora_config: adapter without a directory, whose weights come with the first request that names it.

    prompt_adapter_request: virtual tokens in front of the prompt.

    prompt_tuning_config: virtual tokens that come with the request.

    logits_post_processor_name: logits processor of the launch to use.

    additional_model_outputs: additional outputs to return, as AdditionalModelOutput.

    exclude_input_from_output: False puts the input in front of the output's token ids; not in a stream.
    """

    def __init__(
        self,
        prompt_token_ids: TokenIds,
        sampling_params: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        query_token_ids: TokenIds | None = None,
        streaming: bool = False,
        priority: float = 0,
        cache_salt: str = "",
        label: str = "",
        client_id: int | None = None,
        arrival_time: float | None = None,
        allotted_time_ms: int | None = None,
        return_all_generated_tokens: bool = False,
        exclude_input_from_output: bool = True,
        kv_cache_retention_config: KvCacheRetentionConfig | None = None,
        guided_decoding_params: GuidedDecodingParams | StructuredOutputsParams | None = None,
        external_draft_tokens_config: ExternalDraftTokensConfig | None = None,
        lora_request: LoRARequest | None = None,
        lora_config: LoraConfig | None = None,
        prompt_adapter_request: PromptAdapterRequest | None = None,
        prompt_tuning_config: PromptTuningConfig | None = None,
        logits_post_processor_name: str | None = None,
        additional_model_outputs: Sequence[AdditionalModelOutput] | None = None,
        **others: Any,
    ) -> None:
        """Copy the prompt. Nothing is checked against a model.

        Raises: InvalidRequest that names an invalid or unsupported argument; TypeError for an unknown one.
        """
        _refuse_others(others)
        self.prompt_token_ids = _copy_ids("prompt_token_ids", prompt_token_ids)
        self.query_token_ids = (
            None if query_token_ids is None else _copy_ids("query_token_ids", query_token_ids)
        )
        self.sampling_params = _sampling(sampling_params, max_tokens)
        self.additional_model_outputs = checked_outputs(additional_model_outputs or ())
        if self.additional_model_outputs:
            self.sampling_params = _with_outputs(self.sampling_params, self.additional_model_outputs)
        self.streaming = _checked_bool("streaming", streaming)
        self.priority = _priority(priority)
        self.cache_salt = cache_salt
        self.label = label
        if client_id is not None:
            _check_int("client_id", client_id, 0, MAX_UINT64)
        self.client_id = client_id
        self.arrival_time = arrival_time
        if allotted_time_ms is not None:
            _check_int("allotted_time_ms", allotted_time_ms, 1, MAX_TIME_LIMIT_S * 1000)
        self.allotted_time_ms = allotted_time_ms
        self.return_all_generated_tokens = _checked_bool(
            "return_all_generated_tokens", return_all_generated_tokens
        )
        self.exclude_input_from_output = _checked_bool("exclude_input_from_output", exclude_input_from_output)
        if streaming and not exclude_input_from_output:
            raise InvalidRequest(
                "exclude_input_from_output: a stream has only what is new; the input cannot be in it",
                param="exclude_input_from_output",
            )
        self.kv_cache_retention_config = kv_cache_retention_config
        self.guided_decoding_params = guided_decoding_params
        if not isinstance(external_draft_tokens_config, ExternalDraftTokensConfig | None):
            raise InvalidRequest(
                "external_draft_tokens_config must be an ExternalDraftTokensConfig, got"
                f" {type(external_draft_tokens_config).__name__}",
                param="external_draft_tokens_config",
            )
        self.external_draft_tokens_config = external_draft_tokens_config
        self.lora_request = lora_request
        self.lora_config = lora_config
        self.prompt_adapter_request = prompt_adapter_request
        self.prompt_tuning_config = prompt_tuning_config
        self.logits_post_processor_name = logits_post_processor_name
        self._id = 0

    @property
    def id(self) -> int:
        """Return the id given by `submit`: from 1 on, and unique in its executor. 0 before."""
        return self._id

    @property
    def input_token_ids(self) -> list[int]:
        """Return the ids that the model is given: the prompt, then the query."""
        return self.prompt_token_ids + (self.query_token_ids or [])

    @property
    def num_sequences(self) -> int:
        """Return the number of sequences that are generated, including those that `best_of` does
        not select.
        """
        sampling = self.sampling_params
        return sampling.n if sampling.use_beam_search else sampling.best_of or sampling.n

    def submission(self) -> Submission:
        """Return the request in the client library's form. Raises InvalidRequest for a query that is not
        token ids.
        """
        if self.query_token_ids is not None:
            pack_token_ids("query_token_ids", self.query_token_ids)
        options: RequestOptions = {
            "priority": self.priority,
            "cache_salt": self.cache_salt,
            "label": self.label,
        }
        if self.arrival_time is not None:
            options["arrival_time"] = self.arrival_time
        if self.kv_cache_retention_config is not None:
            options["kv_cache_retention_config"] = self.kv_cache_retention_config
        if self.guided_decoding_params is not None:
            options["structured_outputs"] = self.guided_decoding_params
        if self.external_draft_tokens_config is not None:
            options["draft_token_ids"] = self.external_draft_tokens_config.tokens
        if self.allotted_time_ms is not None:
            options["time_limit"] = self.allotted_time_ms / 1000
        if self.lora_request is not None:
            options["lora_request"] = self.lora_request
        if self.lora_config is not None:
            options["lora_config"] = self.lora_config
        if self.prompt_adapter_request is not None:
            options["prompt_adapter_request"] = self.prompt_adapter_request
        if self.prompt_tuning_config is not None:
            options["prompt_tuning_config"] = self.prompt_tuning_config
        if self.logits_post_processor_name is not None:
            options["logits_processors"] = [{"name": self.logits_post_processor_name}]
        return Submission(
            self.input_token_ids, self.sampling_params, self.streaming, options, is_cumulative=True
        )

    def check(self) -> None:
        """Check what can be checked without the runtime. Raises InvalidRequest."""
        self.check_unsubmitted()
        with self.naming():
            build_request(b"", self.submission())

    def named(self, error: CarouselError) -> CarouselError:
        """Return an error of the request with the argument's name as its caller wrote it."""
        return respelled(error, self._names()) if isinstance(error, RequestError) else error

    def naming(self) -> AbstractContextManager[None]:
        """Return a context manager that changes errors as `named` does."""
        return respelling(self._names())

    def _names(self) -> Mapping[str, str]:
        names = _NAMES
        if self.additional_model_outputs:
            names = names | _OUTPUT_NAMES
        if self.query_token_ids is not None:
            names = names | {"prompt": "input_token_ids"}
        return names

    def set_id(self, request_id: int) -> None:
        """Give the request its id. Raises InvalidRequest if it has one, because a request is submitted once,
        and for a number that is not above 0 and of 64 bits.
        """
        self.check_unsubmitted()
        _check_int("id", request_id, 1, MAX_UINT64)
        self._id = request_id

    def check_unsubmitted(self) -> None:
        """Check that it has no id yet. Raises InvalidRequest when it has one."""
        if self._id:
            raise InvalidRequest(
                f"request {self._id} has already been submitted; make another", param="request"
            )


def _sampling(given: SamplingParams | None, max_tokens: int | None) -> SamplingParams:
    """Return the parameters with `max_tokens`; without any limit if neither argument was given."""
    if given is None:
        return SamplingParams(max_tokens=max_tokens)
    if not isinstance(given, SamplingParams):
        raise InvalidRequest(
            f"sampling_params must be SamplingParams, got {type(given).__name__}", param="sampling_params"
        )
    return given if max_tokens is None else msgspec.structs.replace(given, max_tokens=max_tokens)


def _with_outputs(sampling: SamplingParams, outputs: Sequence[AdditionalModelOutput]) -> SamplingParams:
    """Return the parameters with the names of the outputs. Raises InvalidRequest if they have
    names already.
    """
    if sampling.additional_outputs:
        raise InvalidRequest(
            "additional_model_outputs: sampling_params have additional_outputs; give one of them",
            param="additional_model_outputs",
        )
    return msgspec.structs.replace(
        sampling,
        additional_outputs=tuple([each.name for each in outputs]),
        gather_context=any(each.gather_context for each in outputs),
    )


def _priority(value: Any) -> int:
    """Return a priority in either scale as an integer. `submit` checks an integer's range."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest("priority must be an integer, or a float from 0.0 to 1.0", param="priority")
    if isinstance(value, int):
        return value
    if not 0.0 <= value <= 1.0:
        raise InvalidRequest(f"priority: a float must be from 0.0 to 1.0, got {value}", param="priority")
    return round((value - 0.5) * 2 * MAX_PRIORITY)


def _copy_ids(name: str, ids: Any) -> list[int]:
    """Return a copy of ids from a sequence, or from an array or tensor of any library. `submit` checks the
    ids themselves.
    """
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes) or not ids:
        raise InvalidRequest(
            f"{name} must be token ids, and not empty; text and messages are for Client and LLM", param=name
        )
    if isinstance(ids[0], Mapping):
        raise InvalidRequest(f"{name}: token ids, not chat messages", param=name)
    return list(ids)


def _checked_bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be true or false", param=name)
    return value


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequest(f"{name} must be an integer from {low} to {high}, got {value!r}", param=name)


def _refuse_others(others: Mapping[str, Any]) -> None:
    """Raise TypeError for an unknown argument, and InvalidRequest for one with an unsupported value."""
    for name, value in others.items():
        if name not in NOT_BUILT:
            raise TypeError(f"unexpected keyword argument {name!r}")
        if value is not None:
            raise InvalidRequest(f"{name} is not supported", param=name)
