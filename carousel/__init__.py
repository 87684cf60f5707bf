"""Carousel's public names: client library and errors. Importing it starts nothing and needs no torch."""

from __future__ import annotations

from client.async_client import AsyncClient, AsyncResultStream
from client.batch_manager import BatchManager
from client.client import Client, ResultStream
from client.executor import ExecutorStats, GenerationExecutor
from client.generation_request import GenerationRequest
from client.generation_result import GenerationResult
from client.inference_request import InferenceRequest
from client.llm import LLM
from client.responses import Response
from client.result import Completion, CompletionOutput, Delta, TokenLogprob
from client.retention import KvCacheRetentionConfig, TokenRangeRetentionConfig
from runtime.errors import (
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
from runtime.messages import Usage
from runtime.sampling_params import SamplingParams

__all__ = [
    "LLM", "AsyncClient", "AsyncResultStream", "BatchManager", "CarouselError", "Client", "Completion",
    "CompletionOutput", "ConfigError", "Delta", "ExecutorStats", "GenerationExecutor", "GenerationRequest",
    "GenerationResult", "InferenceRequest", "InvalidRequest", "KvCacheRetentionConfig", "ModelError",
    "Overloaded", "ProtocolMismatch", "RequestAborted", "RequestError", "Response", "ResultStream",
    "RingClosed", "SamplingParams", "StartError", "TokenLogprob", "TokenRangeRetentionConfig", "Usage",
]  # fmt: skip
