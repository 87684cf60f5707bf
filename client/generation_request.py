"""GenerationRequest: what a caller of GenerationExecutor asks. Refuses by name what is not built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from client.request_builder import RequestOptions, TokenIds, build_request
from runtime.errors import InvalidRequest
from runtime.sampling_params import SamplingParams

NOT_BUILT = (
    "arrival_time",
    "disaggregated_params",
    "kv_cache_retention_config",
    "lora_request",
    "multimodal_params",
    "prompt_adapter_request",
    "query_token_ids",
)
"""Arguments that callers of TensorRT-LLM's executor know and that would do nothing here."""
ONLY_ONE = ("n", "best_of")
"""Sequences of one request: one, so far."""


class GenerationRequest:
    def __init__(
        self,
        prompt_token_ids: TokenIds,
        sampling_params: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        streaming: bool = False,
        priority: int = 0,
        cache_salt: str = "",
        label: str = "",
        **others: Any,
    ) -> None:
        """Copy the prompt; nothing is checked against a model. `max_tokens` goes before the one of
        `sampling_params`. The others are as in every generating call of the client library.

        Raises: InvalidRequest for a wrong argument or one that is not built, naming it; TypeError for
        an unknown one.
        """
        for name, value in others.items():
            _refuse(name, value)
        if sampling_params is None:
            sampling_params = SamplingParams()
        if not isinstance(sampling_params, SamplingParams):
            raise InvalidRequest(
                f"sampling_params must be SamplingParams, got {type(sampling_params).__name__}",
                param="sampling_params",
            )
        if max_tokens is not None:
            sampling_params = msgspec.structs.replace(sampling_params, max_tokens=max_tokens)
        if not isinstance(streaming, bool):
            raise InvalidRequest("streaming must be true or false", param="streaming")
        self.id = 0
        """Given by `submit`, from 1 on and unique in its executor; 0 before."""
        self.prompt_token_ids = _copy_ids(prompt_token_ids)
        self.sampling_params = sampling_params
        self.streaming = streaming
        self.priority = priority
        self.cache_salt = cache_salt
        self.label = label

    def options(self) -> RequestOptions:
        """What goes beside prompt and sampling parameters."""
        return {"priority": self.priority, "cache_salt": self.cache_salt, "label": self.label}

    def check(self) -> None:
        """Raises InvalidRequest when it cannot be submitted, as far as that is known without the runtime."""
        self.check_unsubmitted()
        build_request(
            b"", self.prompt_token_ids, self.sampling_params, stream=self.streaming, **self.options()
        )

    def set_id(self, request_id: int) -> None:
        """Raises InvalidRequest when it has one: a request is submitted once."""
        self.check_unsubmitted()
        self.id = request_id

    def check_unsubmitted(self) -> None:
        """Raises InvalidRequest when it has an id."""
        if self.id:
            raise InvalidRequest(
                f"request {self.id} has already been submitted; make another", param="request"
            )


def _copy_ids(ids: Any) -> list[int]:
    """From a sequence, or an array or tensor of any library. The ids themselves are checked when it is
    submitted.
    """
    if hasattr(ids, "tolist"):
        ids = ids.tolist()
    if not isinstance(ids, Sequence) or isinstance(ids, str | bytes) or not ids:
        raise InvalidRequest(
            "prompt_token_ids must be token ids, and not empty; text and messages are for Client and LLM",
            param="prompt_token_ids",
        )
    if isinstance(ids[0], Mapping):
        raise InvalidRequest("prompt_token_ids: token ids, not chat messages", param="prompt_token_ids")
    return list(ids)


def _refuse(name: str, value: Any) -> None:
    """Raises TypeError for an unknown argument, InvalidRequest for one that asks for what is not built."""
    if name not in NOT_BUILT and name not in ONLY_ONE:
        raise TypeError(f"unexpected keyword argument {name!r}")
    if value is not None and not (name in ONLY_ONE and value == 1):
        wanted = f"{name} other than 1" if name in ONLY_ONE else name
        raise InvalidRequest(f"{wanted} is not supported", param=name)
