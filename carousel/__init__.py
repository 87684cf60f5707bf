"""Carousel's public names: the client library and the errors
it raises. Importing it starts nothing and needs no torch.
"""

from __future__ import annotations

from client.async_client import AsyncClient, AsyncResultStream
from client.client import Client, ResultStream
from client.llm import LLM
from client.result import Completion, Delta, TokenLogprob
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
    "LLM",
    "AsyncClient",
    "AsyncResultStream",
    "CarouselError",
    "Client",
    "Completion",
    "ConfigError",
    "Delta",
    "InvalidRequest",
    "ModelError",
    "Overloaded",
    "ProtocolMismatch",
    "RequestAborted",
    "RequestError",
    "ResultStream",
    "RingClosed",
    "SamplingParams",
    "StartError",
    "TokenLogprob",
    "Usage",
]
