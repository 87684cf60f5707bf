"""Choice of the backend for a server over HTTP, and the name of the server's model."""

from __future__ import annotations

import msgspec

from bench_serving.backends.base import Backend, GenerationOptions
from bench_serving.backends.openai import OpenAIBackend
from bench_serving.backends.sglang import SglangBackend
from bench_serving.records import Clock
from carousel.http_client import HttpClient, RequestFailure


class _Models(msgspec.Struct):
    class Card(msgspec.Struct):
        id: str

    data: list[Card]


async def served_model(client: HttpClient) -> str:
    """Return the name of the server's first model. Raises RequestFailure."""
    body = await client.get("/v1/models")
    try:
        return msgspec.json.decode(body, type=_Models).data[0].id
    except (msgspec.DecodeError, IndexError):
        raise RequestFailure("/v1/models names no model; name one with --model") from None


def http_backend(
    speaks: str, client: HttpClient, model: str, options: GenerationOptions, clock: Clock
) -> Backend:
    """Return the backend for the API `speaks`: completions, chat or generate."""
    if speaks == "generate":
        return SglangBackend(client, options, clock)
    return OpenAIBackend(client, "chat" if speaks == "chat" else "completions", model, options, clock)
