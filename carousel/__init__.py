"""Carousel's public names: client library and errors. Importing it starts nothing and needs no torch."""

from __future__ import annotations

from carousel.client.async_ import AsyncClient, AsyncResultStream
from carousel.client.core.result import Completion, CompletionOutput, Delta, TokenLogprob
from carousel.client.offline import LLM
from carousel.client.sync import Client, ResultStream
from carousel.retention import KvCacheRetentionConfig, TokenRangeRetentionConfig
from carousel.trtllm.batch_manager import BatchManager
from carousel.trtllm.executor import ExecutorStats, GenerationExecutor
from carousel.trtllm.generation_request import GenerationRequest
from carousel.trtllm.generation_result import GenerationResult
from carousel.trtllm.inference_request import InferenceRequest
from carousel.trtllm.responses import Response
from runtime.base.errors import (
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
    "LLM", "AsyncClient", "AsyncResultStream", "BatchManager", "CarouselError", "Client", "Completion",
    "CompletionOutput", "ConfigError", "Delta", "ExecutorStats", "GenerationExecutor", "GenerationRequest",
    "GenerationResult", "InferenceRequest", "InvalidRequest", "KvCacheRetentionConfig", "ModelError",
    "Overloaded", "ProtocolMismatch", "RequestAborted", "RequestError", "Response", "ResultStream",
    "RingClosed", "SamplingParams", "StartError", "TokenLogprob", "TokenRangeRetentionConfig", "Usage",
]  # fmt: skip
