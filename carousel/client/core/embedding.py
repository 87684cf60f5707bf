"""Embedding: the vector of one text, and the request for it, which consists of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec
import numpy as np

from carousel.client.core.result import Completion
from runtime.base.errors import RequestError
from runtime.wire.format import FloatArray
from runtime.wire.messages import Usage
from runtime.wire.sampling_params import SamplingParams

Inputs: TypeAlias = list[str] | list[list[int]]
"""Several texts, or the token ids of several, as types that a type checker can distinguish from a single one.
"""
PAIRS_AT_ONCE = 64
"""Number of pairs of vectors that are compared at once, as float64."""
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


def similarities(first: Sequence[Embedding], second: Sequence[Embedding]) -> list[float]:
    """Return the cosines of the angles between vectors, in pairs, or of one with each of several; 0 for one
    without a length.
    """
    found: list[float] = []
    for start in range(0, len(second), PAIRS_AT_ONCE):
        pairs = slice(start, start + PAIRS_AT_ONCE)
        left, right = (
            np.array([each.vector for each in side], np.float64)
            for side in (first if len(first) == 1 else first[pairs], second[pairs])
        )
        lengths = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
        products = (left * right).sum(axis=1)
        found += np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0).tolist()
    return found
