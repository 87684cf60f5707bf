"""The requests and the answers of /score and /rerank, field by field."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import UNSET, Meta, Struct, UnsetType

from carousel.server.openai.embedding_types import MAX_INPUTS, EmbeddingUsage, VectorBody

ComparedTexts: TypeAlias = str | Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]


class ScoreBody(VectorBody, forbid_unknown_fields=True, kw_only=True):
    """vLLM's: texts to compare, one with each of several or in pairs."""

    text_1: ComparedTexts
    text_2: ComparedTexts


class RerankBody(VectorBody, forbid_unknown_fields=True, kw_only=True):
    """Jina's and Cohere's: texts to bring in order."""

    query: str
    documents: ComparedTexts
    top_n: Annotated[int, Meta(ge=0)] | None = None
    """Maximum number of results; 0: all."""
    return_documents: bool | None = None
    """False leaves the texts out of the answer."""


class ScoreItem(Struct):
    index: int
    score: float
    """Cosine of the angle between the two vectors."""
    object: Literal["score"] = "score"


class ScoreResponse(Struct):
    id: str
    created: int
    model: str
    data: list[ScoreItem]
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class RankedDocument(Struct):
    text: str


class RerankItem(Struct):
    index: int
    """Place of the text in the request."""
    relevance_score: float
    """Cosine of the angle between its vector and the query's."""
    document: RankedDocument | UnsetType = UNSET


class RerankResponse(Struct):
    id: str
    model: str
    results: list[RerankItem]
    """The most relevant first."""
    usage: EmbeddingUsage
