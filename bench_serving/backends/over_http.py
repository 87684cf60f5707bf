"""Choice of the backend for a server over HTTP, the name of the server's model, and its tokenizer."""

from __future__ import annotations

from contextlib import suppress

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


class _ModelInfo(msgspec.Struct):
    tokenizer_path: str


async def served_model(client: HttpClient) -> str:
    """Return the name of the server's first model. Raises RequestFailure."""
    body = await client.get("/v1/models")
    try:
        return msgspec.json.decode(body, type=_Models).data[0].id
    except (msgspec.DecodeError, IndexError):
        raise RequestFailure("/v1/models names no model; name one with --model") from None


async def tokenizer_path(client: HttpClient) -> str:
    """Return the path of the tokenizer on the server's machine; empty if the server does not say."""
    for path in ("/model_info", "/get_model_info"):  # of SGLang, and of its earlier versions
        with suppress(RequestFailure, msgspec.DecodeError):
            return msgspec.json.decode(await client.get(path), type=_ModelInfo).tokenizer_path
    return ""


def http_backend(
    speaks: str, client: HttpClient, model: str, options: GenerationOptions, clock: Clock
) -> Backend:
    """Return the backend for the API `speaks`: completions, chat or generate."""
    if speaks == "generate":
        return SglangBackend(client, options, clock)
    return OpenAIBackend(client, "chat" if speaks == "chat" else "completions", model, options, clock)
