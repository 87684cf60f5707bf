"""Routes /, /version, /model_info and /get_load, which routers and load generators of SGLang and vLLM ask
before they send requests. They are answered in any state of the processes.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from carousel.server.server_state import ServerState


class Index(msgspec.Struct):
    """Answer of `/` to clients other than browsers, which get the page."""

    name: str
    version: str
    models: list[str]
    openapi: str
    """Path of the API description, relative to this one."""
    page: bool
    """True if browsers get a page here."""


class Version(msgspec.Struct):
    version: str


class ModelInfo(msgspec.Struct):
    model_path: str
    tokenizer_path: str
    """Directory of the tokenizer; empty without one."""
    is_generation: bool
    max_model_len: int
    weight_version: str


class Load(msgspec.Struct):
    """Load in SGLang's names. `num_tokens` counts the KV cache in use and waiting prompts."""

    dp_rank: int
    num_reqs: int
    num_waiting_reqs: int
    num_tokens: int


async def index(request: Request) -> Response:
    """Answer a client that does not ask for the page."""
    server: ServerState = request.app.state.server
    config = server.config
    return _json(Index("carousel", _version(), list(config.model_names), "openapi.json", not config.no_page))


async def version(_: Request) -> Response:
    """Answer with the version of the installed package."""
    return _json(Version(_version()))


async def model_info(request: Request) -> Response:
    server: ServerState = request.app.state.server
    config = await server.served_config()
    is_generation = config.task == "generate"
    return _json(
        ModelInfo(config.model, config.tokenizer, is_generation, config.context_length, config.weight_version)
    )


async def get_load(request: Request) -> Response:
    """Answer with a list of one entry: servers with several engines have one for each."""
    server: ServerState = request.app.state.server
    load = server.status.read("scheduler")
    num_used_pages = load.num_pages - load.num_free_pages
    num_tokens = num_used_pages * server.config.page_size + load.queued_prompt_tokens
    return _json([Load(0, load.num_running + load.num_waiting, load.num_waiting, num_tokens)])


@cache
def _version() -> str:
    try:
        return installed_version("carousel")
    except PackageNotFoundError:  # launch.py of a checkout that is not installed
        return "unknown"


def _json(body: msgspec.Struct | list[Load]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
