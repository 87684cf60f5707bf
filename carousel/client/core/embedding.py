"""Embedding: the vector of one text, and the request for it, which consists of its prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from carousel.client.core.result import Completion
from runtime.base.errors import RequestError
from runtime.wire.format import FloatArray
from runtime.wire.messages import Usage
from runtime.wire.sampling_params import SamplingParams

Inputs: TypeAlias = list[str] | list[list[int]]
"""Several texts, or the token ids of several, as types that a type checker can distinguish from a single one.
"""
NO_OUTPUT = SamplingParams(max_tokens=1, temperature=0.0)
"""Sampling parameters of a request that ends with its prompt, so that nothing is sampled."""


def embedding_params(truncate_prompt_tokens: int | None) -> SamplingParams:
    """Return NO_OUTPUT for a prompt that is cut to this many of its last tokens."""
    return msgspec.structs.replace(NO_OUTPUT, truncate_prompt_tokens=truncate_prompt_tokens)


@dataclass(frozen=True, slots=True)
class Embedding:
    vector: FloatArray = field(compare=False)
    """Vector [hidden_size] float32."""
    usage: Usage
    label: str = ""


def embedding_of(completion: Completion) -> Embedding:
    """Return the vector of a request that has ended. Raises RequestError if it ended before its vector was
    computed.
    """
    if completion.embedding is None:
        reason = completion.finish_reason
        raise RequestError(f"the request ended early ({reason}), without a vector", code=reason, status=503)
    return Embedding(completion.embedding, completion.usage, completion.label)
