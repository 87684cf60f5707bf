"""Request and answer of OpenAI's embeddings endpoint."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from carousel.server.openai.types import CacheSalt, NumKept, PromptIds, TimeLimit
from runtime.wire.format import Priority
from runtime.wire.sampling_params import TokenId

MAX_INPUTS = 2048
EmbeddingInputs: TypeAlias = Annotated[
    list[TokenId | str | PromptIds], Meta(min_length=1, max_length=1 << 20)
]


class VectorBody(Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of all requests that are answered from vectors."""

    model: str | None = None

    # Fields of other servers, not in OpenAI's API.
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: NumKept | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    time_limit: TimeLimit | None = None
    """Time limit in seconds."""


class EmbeddingBody(VectorBody, forbid_unknown_fields=True, kw_only=True):
    input: str | EmbeddingInputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    """Number of leading components to return, as a vector of length one."""


class EmbeddingUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingItem(Struct):
    index: int
    embedding: list[float] | str
    """Components, or the base64 of packed little-endian float32."""
    object: Literal["embedding"] = "embedding"


class EmbeddingResponse(Struct):
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"
