"""/score and /rerank: how near texts are to each other, by the vectors of an embedding model."""

from __future__ import annotations

import time
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from carousel.client.core.embedding import embedding_of, similarities
from carousel.client.core.result import Completion
from carousel.server.answer.generation import Generation
from carousel.server.openai.embedding_types import MAX_INPUTS
from carousel.server.openai.embeddings import usage_of_prompts, vectors_asked
from carousel.server.request.body import read_body
from carousel.server.server_state import ServerState, new_id
from carousel.server.spelling.large_parts import WholeFormat
from carousel.server.vectors.scoring_types import (
    ComparedTexts,
    RankedDocument,
    RerankBody,
    RerankItem,
    RerankResponse,
    ScoreBody,
    ScoreItem,
    ScoreResponse,
)
from runtime.base.errors import InvalidRequest


async def create_score(request: Request) -> Response:
    server: ServerState = request.app.state.server
    body = await read_body(request, ScoreBody)
    first, second = _listed(body.text_1), _listed(body.text_2)
    if len(first) not in (1, len(second)):
        raise InvalidRequest(
            f"text_1: one text, or as many as text_2, which has {len(second)}; got {len(first)}",
            param="text_1",
        )
    _check_number(first, second, "text_2")
    asked = vectors_asked(request, body, [*first, *second])
    answer = ScoreFormat(server.config.model_names[0], len(first))
    return Generation(server, asked, answer, {"prompt": "text_1, text_2"})


async def create_ranking(request: Request) -> Response:
    server: ServerState = request.app.state.server
    body = await read_body(request, RerankBody)
    documents = _listed(body.documents)
    _check_number([body.query], documents, "documents")
    asked = vectors_asked(request, body, [body.query, *documents])
    answer = RerankFormat(server.config.model_names[0], body, documents)
    return Generation(server, asked, answer, {"prompt": "query, documents"})


class ScoreFormat(WholeFormat):
    """The answer of /score."""

    def __init__(self, model: str, num_first: int) -> None:
        """num_first: texts of the first field, which come before the others."""
        self._model = model
        self._num_first = num_first

    def response(self, completions: Sequence[Completion]) -> ScoreResponse:
        vectors = [embedding_of(each) for each in completions]
        scores = similarities(vectors[: self._num_first], vectors[self._num_first :])
        items = [ScoreItem(index, score) for index, score in enumerate(scores)]
        usage = usage_of_prompts(completions)
        return ScoreResponse(new_id("score"), int(time.time()), self._model, items, usage)


class RerankFormat(WholeFormat):
    """The answer of /rerank."""

    def __init__(self, model: str, body: RerankBody, documents: Sequence[str]) -> None:
        self._model = model
        self._num_results = body.top_n or None
        self._documents = None if body.return_documents is False else documents
        """Texts that the answer shows."""

    def response(self, completions: Sequence[Completion]) -> RerankResponse:
        vectors = [embedding_of(each) for each in completions]
        scores = similarities(vectors[:1], vectors[1:])
        # Equal scores keep their order.
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        items = [RerankItem(index, scores[index]) for index in order[: self._num_results]]
        if self._documents is not None:
            for item in items:
                item.document = RankedDocument(self._documents[item.index])
        return RerankResponse(new_id("rerank"), self._model, items, usage_of_prompts(completions))


def _listed(texts: ComparedTexts) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _check_number(first: Sequence[str], second: Sequence[str], name: str) -> None:
    """Raise InvalidRequest if there are too many texts together."""
    total = len(first) + len(second)
    if total > MAX_INPUTS:
        raise InvalidRequest(f"{name}: at most {MAX_INPUTS} texts in all, got {total}", param=name)
