"""Route /v1/embeddings: returns a vector for each text."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence

import numpy as np
from msgspec.json import encode
from starlette.requests import Request
from starlette.responses import Response

from carousel.client.core.embedding import embedding_of, embedding_params
from carousel.client.core.request.submission import Prompt, RequestOptions, Submission
from carousel.client.core.result import Completion
from carousel.server.answer.generation import Generation
from carousel.server.openai.embedding_types import (
    MAX_INPUTS,
    EmbeddingBody,
    EmbeddingItem,
    EmbeddingResponse,
    EmbeddingUsage,
    VectorBody,
)
from carousel.server.request.body import read_body
from carousel.server.request.labels import request_labels
from carousel.server.request.prompts import prompts_of, submissions_for
from carousel.server.request.sampling import request_options
from carousel.server.server_state import ServerState
from carousel.server.spelling.large_parts import LargeParts, listed
from runtime.base.errors import InvalidRequest
from runtime.wire.format import FloatArray

PARAM_NAMES = {"prompt": "input"}


async def create_embedding(request: Request) -> Response:
    server: ServerState = request.app.state.server
    body = await read_body(request, EmbeddingBody)
    asked = vectors_asked(request, body, prompts_of(body.input, "input", MAX_INPUTS))
    return Generation(server, asked, EmbeddingFormat(body, server.config.model_names[0]), PARAM_NAMES)


def vectors_asked(request: Request, body: VectorBody, inputs: Sequence[Prompt]) -> list[Submission]:
    """Return the requests for a vector of each input. Raises RequestError, RingClosed."""
    server: ServerState = request.app.state.server
    server.check_model(body.model)
    server.check_serving()
    labels = request_labels(request.state.request_id, len(inputs))
    return submissions_for(inputs, embedding_params(body.truncate_prompt_tokens), _options(body), labels)


def usage_of_prompts(completions: Sequence[Completion]) -> EmbeddingUsage:
    num_tokens = sum(completion.usage.prompt_tokens for completion in completions)
    return EmbeddingUsage(num_tokens, num_tokens)


def _options(body: VectorBody) -> RequestOptions:
    options = request_options(priority=body.priority, cache_salt=body.cache_salt, time_limit=body.time_limit)
    options["task"] = "embed"
    if body.add_special_tokens is not None:
        options["add_special_tokens"] = body.add_special_tokens
    return options


class EmbeddingFormat:
    """Format of the answer, which is never streamed."""

    is_parsed = False

    def __init__(self, body: EmbeddingBody, model: str) -> None:
        # Not the body, which has the inputs.
        self._num_dimensions = body.dimensions
        self._is_base64 = body.encoding_format == "base64"
        self._model = model

    def pieces(self, completions: Sequence[Completion]) -> Iterator[bytes]:
        """Yield the body of the answer. Raises InvalidRequest if the vectors have fewer dimensions than
        requested.
        """
        for completion in completions:
            self._check(embedding_of(completion).vector)
        large = LargeParts()
        data = large.add(list[EmbeddingItem], lambda: listed(self._items(completions)))
        yield from large.filled(encode(EmbeddingResponse(data, self._model, usage_of_prompts(completions))))

    def _items(self, completions: Sequence[Completion]) -> Iterator[bytes]:
        for index, completion in enumerate(completions):
            yield encode(EmbeddingItem(index, self._spelled(embedding_of(completion).vector)))

    def _check(self, vector: FloatArray) -> None:
        wanted = self._num_dimensions
        if wanted is not None and wanted > len(vector):
            raise InvalidRequest(
                f"dimensions: {wanted} were asked for, the model's vectors have {len(vector)}",
                param="dimensions",
            )

    def _spelled(self, vector: FloatArray) -> list[float] | str:
        if self._num_dimensions is not None:
            vector = shortened(vector, self._num_dimensions)
        if self._is_base64:
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        numbers: list[float] = vector.tolist()
        return numbers


def shortened(vector: FloatArray, num_dimensions: int) -> FloatArray:
    """Return the first components of a vector, scaled to length one, as some models are trained for."""
    first: FloatArray = vector[:num_dimensions]
    length = float(np.linalg.norm(first))
    return first / np.float32(length) if length else first
