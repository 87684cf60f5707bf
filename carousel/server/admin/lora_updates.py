"""Routes that load and unload adapters while the server runs: /v1/load_lora_adapter and
/v1/unload_lora_adapter as in vLLM, /load_lora_adapter and /unload_lora_adapter as in SGLang. Off without
--allow-lora-updates.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from carousel.lora import MAX_PATH_CHARS, LoRARequest
from carousel.server.admin.callers import check_is_from_here
from carousel.server.request.body import read_body
from carousel.server.server_state import CONTROL_TIMEOUT_S, ServerState
from runtime.base.errors import Forbidden, InvalidRequest, RequestError
from runtime.checkpoint.adapters.lora_config import CONFIG_FILE, WEIGHTS_FILE, read_adapter
from runtime.ring.adapters_file import ListedAdapter, Wanted
from runtime.wire.format import MAX_LABEL_CHARS, MAX_PRIORITY
from runtime.wire.plan import NO_LORA
from runtime.wire.sampling_params import SamplingParams

TRIAL_TIMEOUT_S = 60.0
"""Seconds for the trial request of one token, which a new adapter has to compute before it counts as loaded.
"""

AdapterName = Annotated[str, Meta(min_length=1, max_length=MAX_LABEL_CHARS)]


class LoadAdapterBody(Struct, forbid_unknown_fields=True, kw_only=True):
    lora_name: AdapterName
    lora_path: Annotated[str, Meta(min_length=1, max_length=MAX_PATH_CHARS)]
    """Directory below --lora-dir, relative to it or absolute."""
    load_inplace: bool | None = None
    """Replace an adapter that has the name."""
    pinned: bool | None = None
    """Keep the adapter on the device until it is unloaded."""


class UnloadAdapterBody(Struct, forbid_unknown_fields=True, kw_only=True):
    lora_name: AdapterName


class UpdateAnswer(Struct):
    success: bool
    loaded_adapters: dict[str, str]
    """Directories of all adapters that can be named, by name."""


async def load_adapter(request: Request) -> Response:
    """Serve an adapter under a name. When the answer comes, it is on the device and fits the model."""
    body = await read_body(request, LoadAdapterBody)
    server = _allowed(request)
    name = body.lora_name
    _check_name(server, name)
    path = await asyncio.to_thread(_checked_path, server, body.lora_path)

    def decide(listed: Mapping[str, ListedAdapter]) -> Wanted:
        if name in listed and not body.load_inplace:
            raise InvalidRequest(
                f"lora_name: {name} is an adapter already; load_inplace: true puts another one in its place",
                param="lora_name",
                code="adapter_exists",
            )
        if body.pinned:
            _check_room(server, listed, name)
        return Wanted(path, bool(body.pinned))

    before = await asyncio.to_thread(server.adapters.change, name, decide)
    try:
        await _try(server, name)
    except BaseException:
        old = Wanted(before.path, before.pinned) if before else None
        await asyncio.to_thread(server.adapters.change, name, lambda _: old)
        raise
    return _answer(server)


async def unload_adapter(request: Request) -> Response:
    """Stop serving an adapter: new requests are refused, running ones end, then its memory is free."""
    body = await read_body(request, UnloadAdapterBody)
    server = _allowed(request)
    name = body.lora_name

    def decide(listed: Mapping[str, ListedAdapter]) -> None:
        if name not in listed:
            raise RequestError(
                f"lora_name: there is no adapter {name!r:.100}",
                param="lora_name",
                code="unknown_adapter",
                status=404,
            )

    await asyncio.to_thread(server.adapters.change, name, decide)
    await server.client.drop_adapter(name, timeout=CONTROL_TIMEOUT_S)
    return _answer(server)


def _allowed(request: Request) -> ServerState:
    """Check that adapters may be changed, and by this caller. Raises Forbidden; InvalidRequest if no adapters
    are served.
    """
    server: ServerState = request.app.state.server
    config = server.config
    if not config.enable_lora:
        raise InvalidRequest(NO_LORA, code="lora_not_enabled")
    if not config.allow_lora_updates:
        raise Forbidden("this server was started without --allow-lora-updates")
    check_is_from_here(request, "adapters are loaded and unloaded")
    server.check_serving()
    return server


def _check_name(server: ServerState, name: str) -> None:
    if "/" in name or name in server.config.model_names:
        what = "has a slash" if "/" in name else "is the name of the model"
        raise InvalidRequest(f"lora_name: {name!r} {what}", param="lora_name")


def _check_room(server: ServerState, listed: Mapping[str, ListedAdapter], name: str) -> None:
    """Raise InvalidRequest if one more pinned adapter would leave no slot for all others."""
    pinned = [other for other, each in listed.items() if each.pinned and other != name]
    if len(pinned) + 1 >= server.config.max_loras:
        raise InvalidRequest(
            f"pinned: {len(pinned)} of {server.config.max_loras} slots (--max-loras) are pinned, and one is "
            "for all other adapters; unload a pinned one, or load this one without",
            param="pinned",
            code="too_many_pinned",
        )


def _checked_path(server: ServerState, given: str) -> str:
    """Return the adapter's directory, which is readable and below --lora-dir with all its files. Raises
    InvalidRequest.
    """
    allowed = os.path.realpath(server.config.lora_dir)
    try:
        path = os.path.realpath(os.path.join(allowed, given))
        inside = [path, *(os.path.realpath(os.path.join(path, name)) for name in (CONFIG_FILE, WEIGHTS_FILE))]
    except (OSError, ValueError):
        raise InvalidRequest("lora_path: it is no path", param="lora_path") from None
    if any(os.path.commonpath([allowed, each]) != allowed for each in inside):
        raise InvalidRequest("lora_path: it leads out of --lora-dir", param="lora_path")
    try:
        read_adapter(Path(path), server.config.max_lora_rank)
    except InvalidRequest as error:
        raise InvalidRequest(f"lora_path: {error.message}", param="lora_path", code=error.code) from None
    return path


async def _try(server: ServerState, name: str) -> None:
    """Compute one token with an adapter, to find out whether it fits the model. Raises RequestError."""
    try:
        await server.client.generate(
            [0],
            SamplingParams(max_tokens=1, temperature=0.0),
            timeout=TRIAL_TIMEOUT_S,
            priority=MAX_PRIORITY,
            lora_request=LoRARequest(name, 1),
        )
    except TimeoutError:
        raise RequestError("the adapter was not loaded in time", code="timeout", status=503) from None
    except InvalidRequest as error:
        raise InvalidRequest(f"lora_path: {error.message}", param="lora_path", code=error.code) from None


def _answer(server: ServerState) -> Response:
    listed: dict[str, Any] = {name: each.path for name, each in server.adapters.read().items()}
    body = UpdateAnswer(success=True, loaded_adapters=listed)
    return Response(msgspec.json.encode(body), media_type="application/json")
