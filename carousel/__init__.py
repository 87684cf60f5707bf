"""Carousel's public names: client library and errors. Importing this package starts nothing and needs no
torch. The module behind a name is imported when the name is first used.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from carousel.client.async_ import AsyncClient
    from carousel.client.core.logprobs import TokenLogprob
    from carousel.client.core.result import Completion, CompletionOutput, Delta
    from carousel.client.core.streams import AsyncResultStream, ResultStream
    from carousel.client.offline import LLM
    from carousel.client.sync import Client
    from carousel.client.vllm_calls import BeamSearchParams
    from carousel.lora import LoraConfig, LoRARequest
    from carousel.prompt_tables import PromptAdapterRequest, PromptTuningConfig
    from carousel.retention import KvCacheRetentionConfig, TokenRangeRetentionConfig
    from carousel.structured_outputs import GuidedDecodingParams, StructuredOutputsParams
    from carousel.trtllm.batch_manager import BatchManager
    from carousel.trtllm.executor import GenerationExecutor, RayExecutor
    from carousel.trtllm.executor_config import (
        AdditionalModelOutput,
        CapacitySchedulerPolicy,
        ExecutorConfig,
        ExternalDraftTokensConfig,
        GuidedDecodingConfig,
        KvCacheConfig,
        PeftCacheConfig,
        SchedulerConfig,
    )
    from carousel.trtllm.executor_stats import ExecutorStats
    from carousel.trtllm.generation_request import GenerationRequest
    from carousel.trtllm.generation_result import GenerationResult
    from carousel.trtllm.inference_request import InferenceRequest
    from carousel.trtllm.responses import Response
    from runtime.base.errors import (
        AdapterNotResident,
        CarouselError,
        ConfigError,
        InvalidRequest,
        ModelError,
        Overloaded,
        ProtocolMismatch,
        RequestAborted,
        RequestError,
        RingClosed,
        StartError,
    )
    from runtime.wire.messages import Usage
    from runtime.wire.sampling_params import SamplingParams

__all__ = [
    "LLM", "AdapterNotResident", "AdditionalModelOutput", "AsyncClient", "AsyncResultStream", "BatchManager",
    "BeamSearchParams", "CapacitySchedulerPolicy", "CarouselError", "Client", "Completion",
    "CompletionOutput", "ConfigError", "Delta", "ExecutorConfig", "ExecutorStats",
    "ExternalDraftTokensConfig", "GenerationExecutor", "GenerationRequest", "GenerationResult",
    "GuidedDecodingConfig", "GuidedDecodingParams", "InferenceRequest", "InvalidRequest", "KvCacheConfig",
    "KvCacheRetentionConfig", "LoRARequest", "LoraConfig", "ModelError", "Overloaded", "PeftCacheConfig",
    "PromptAdapterRequest", "PromptTuningConfig", "ProtocolMismatch", "RayExecutor", "RequestAborted",
    "RequestError", "Response", "ResultStream", "RingClosed", "SamplingParams", "SchedulerConfig",
    "StartError", "StructuredOutputsParams", "TokenLogprob", "TokenRangeRetentionConfig", "Usage",
]  # fmt: skip

_MODULES = {
    "AdapterNotResident": "runtime.base.errors",
    "AdditionalModelOutput": "carousel.trtllm.executor_config",
    "AsyncClient": "carousel.client.async_",
    "AsyncResultStream": "carousel.client.core.streams",
    "BatchManager": "carousel.trtllm.batch_manager",
    "BeamSearchParams": "carousel.client.vllm_calls",
    "CarouselError": "runtime.base.errors",
    "CapacitySchedulerPolicy": "carousel.trtllm.executor_config",
    "Client": "carousel.client.sync",
    "Completion": "carousel.client.core.result",
    "CompletionOutput": "carousel.client.core.result",
    "ConfigError": "runtime.base.errors",
    "Delta": "carousel.client.core.result",
    "ExecutorConfig": "carousel.trtllm.executor_config",
    "ExecutorStats": "carousel.trtllm.executor_stats",
    "ExternalDraftTokensConfig": "carousel.trtllm.executor_config",
    "GenerationExecutor": "carousel.trtllm.executor",
    "GenerationRequest": "carousel.trtllm.generation_request",
    "GenerationResult": "carousel.trtllm.generation_result",
    "GuidedDecodingConfig": "carousel.trtllm.executor_config",
    "GuidedDecodingParams": "carousel.structured_outputs",
    "InferenceRequest": "carousel.trtllm.inference_request",
    "InvalidRequest": "runtime.base.errors",
    "KvCacheConfig": "carousel.trtllm.executor_config",
    "KvCacheRetentionConfig": "carousel.retention",
    "LLM": "carousel.client.offline",
    "LoRARequest": "carousel.lora",
    "LoraConfig": "carousel.lora",
    "ModelError": "runtime.base.errors",
    "Overloaded": "runtime.base.errors",
    "PeftCacheConfig": "carousel.trtllm.executor_config",
    "PromptAdapterRequest": "carousel.prompt_tables",
    "PromptTuningConfig": "carousel.prompt_tables",
    "ProtocolMismatch": "runtime.base.errors",
    "RayExecutor": "carousel.trtllm.executor",
    "RequestAborted": "runtime.base.errors",
    "RequestError": "runtime.base.errors",
    "Response": "carousel.trtllm.responses",
    "ResultStream": "carousel.client.core.streams",
    "RingClosed": "runtime.base.errors",
    "SamplingParams": "runtime.wire.sampling_params",
    "SchedulerConfig": "carousel.trtllm.executor_config",
    "StartError": "runtime.base.errors",
    "StructuredOutputsParams": "carousel.structured_outputs",
    "TokenLogprob": "carousel.client.core.logprobs",
    "TokenRangeRetentionConfig": "carousel.retention",
    "Usage": "runtime.wire.messages",
}
"""Module of each public name."""


def __getattr__(name: str) -> object:
    """Import the module of a public name on its first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _check_neighbours()
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def _check_neighbours() -> None:
    """Raise ImportError if a folder or file of the caller shadows our package `runtime`."""
    ours, found = Path(__file__).parents[1] / "runtime", import_module("runtime").__file__ or "a folder"
    if Path(found).parent != ours:
        raise ImportError(
            f"carousel needs its package runtime in {ours}, but {found} is found before it: "
            "rename that, or run the script from another folder"
        )


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
