"""Reading of HTTP bodies as typed objects, with limits, and with errors that name the field."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from starlette.requests import Request

from carousel.server.http.body_pool import MAX_BODY_BYTES, BodyShare
from carousel.server.request.decode import decode_body, is_truncated
from carousel.server.request.held_body import STATE, HeldBody
from carousel.server.request.large_fields import PromptLimits
from carousel.server.request.large_json import BodyBytes, Wait
from carousel.server.request.unknown_fields import FieldFilter
from carousel.server.server_state import ServerState
from carousel.server.tenancy.auth import tenant_of
from runtime.base.errors import InvalidRequest, RequestAborted, RequestError

BODY_TIMEOUT_S = 30.0
IGNORED_HEADER = b"x-carousel-ignored"
PACED_BYTES = 64 << 10
"""Bytes of a large body that are decoded as one of its pieces (`BodyPace`)."""
LEAST_BYTES = 1 << 10
"""Least number of bytes that a decoded piece counts for, because not all of its work grows with its size."""

T = TypeVar("T")


async def read_body(request: Request, kind: type[T]) -> T:
    """Return the decoded body. `request.state.received_s` is the time of its arrival, by time.perf_counter().

    Raises RequestError with the fitting status: 400, 408, 413 or 415; Overloaded if there is no room for a
    large body; RequestAborted if the caller has left.
    """
    server: ServerState = request.app.state.server
    tenant = tenant_of(request.scope).name
    held = HeldBody(server.bodies, server.kept_prompts, tenant)
    # It is released at the end of the request, however that comes.
    request.scope["state"][STATE] = held
    try:
        data = await _read_bytes(request, held.reading)
        await held.kept.grow_to(len(data))
        return await _decoded(request, data, kind, held)
    except RequestError:
        held.release()
        # Many bodies are refused together, after the same wait; the refusals take turns.
        await server.entrance.enter(0, tenant)
        raise
    finally:
        held.end_reading()


async def _decoded(request: Request, data: BodyBytes, kind: type[T], held: HeldBody) -> T:
    state: dict[str, Any] = request.scope["state"]  # `request.state` looks for each name in several places
    state["received_s"] = time.perf_counter()
    server: ServerState = request.app.state.server
    tenant = tenant_of(request.scope).name
    entrance = server.entrance
    await entrance.enter(len(data), tenant)
    async with AsyncExitStack() as alone:

        async def begin(small: Any) -> None:
            """Wait until the large fields of the body may be decoded; `small` has the others."""
            if is_truncated(small):
                await held.take_turn(server.tokenizer.cut_turns(len(data)))
            else:
                await alone.enter_async_context(entrance.alone(len(data), tenant))
            if state["has_left"]():
                raise RequestAborted("the client has left")

        wait = _turns_of_pieces(server, tenant)
        fields = FieldFilter(server.config.unknown_fields, wait)
        limits = PromptLimits(server.max_ids, server.tokenizer.max_prompt_chars)
        if state["has_left"]():
            raise RequestAborted("the client has left")
        body = await decode_body(data, kind, limits, wait, fields, begin)
        if names := fields.ignored:
            server.ignored.note(request.url.path, names)
            _name_in_answer(request, names)
        return body


def ignore_hints(request: Request, reasons: Mapping[str, str]) -> None:
    """Name the fields in the answer that ask for no certain answer and have no effect here, as unknown ones
    are. `reasons` says why. Raises InvalidRequest where such fields are refused.
    """
    server: ServerState = request.app.state.server
    policy = server.config.unknown_fields
    for name, reason in reasons.items():
        if policy == "refuse":
            raise InvalidRequest(f"{name}: {reason}", param=name, code="unsupported_parameter")
    if reasons and policy == "warn":
        server.ignored.note(request.url.path, reasons, "fields without an effect here")
        _name_in_answer(request, [*reasons])


def _name_in_answer(request: Request, names: Sequence[str]) -> None:
    told: Sequence[bytes] = [value for _, value in getattr(request.state, "answer_headers", ())]
    value = b",".join([*told, *(name.encode() for name in names)])
    request.state.answer_headers = [(IGNORED_HEADER, value)]


def _turns_of_pieces(server: ServerState, tenant: str) -> Wait:
    """Return a function that waits for the next turn of a large body that is being decoded."""
    num_unpaid = 0

    async def go_on(num_bytes: int) -> None:
        nonlocal num_unpaid
        await server.entrance.go_on(num_bytes, tenant)
        num_unpaid += max(num_bytes, LEAST_BYTES)
        if num_unpaid >= PACED_BYTES:
            num_unpaid = 0
            await server.body_pace.take_piece(tenant)

    return go_on


async def read_optional_body(request: Request, kind: type[T]) -> T:
    """Return what `read_body` does; a missing body stands for the defaults. Raises RequestError."""
    headers = _fields(request)
    is_empty = headers.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in headers
    # Without a CORS preflight, a web page cannot send JSON's type, and without a type it always sends its
    # origin.
    if is_empty and (_is_json(headers) or not headers.keys() & {b"origin", b"content-type"}):
        return kind()
    return await read_body(request, kind)


async def _read_bytes(request: Request, share: BodyShare) -> BodyBytes:
    headers = _fields(request)
    # A web page can send any other type to this server without a CORS preflight.
    if not _is_json(headers):
        raise RequestError("Content-Type must be application/json", code="unsupported_media_type", status=415)
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise RequestError("Content-Encoding is not supported", code="unsupported_encoding", status=415)
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length) > MAX_BODY_BYTES:
        raise _too_large()
    body = BodyBytes()
    try:
        if request.scope["state"]["has_whole_body"]():  # as most have, which then need no timer
            await _receive_all(request, share, body)
        else:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                await _receive_all(request, share, body)
    except TimeoutError:
        raise RequestError(
            f"the body took longer than {BODY_TIMEOUT_S:.0f} s", code="timeout", status=408
        ) from None
    return body


async def _receive_all(request: Request, share: BodyShare, body: BodyBytes) -> None:
    is_whole = False
    while not is_whole:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise RequestAborted("the client has left")
        part, is_whole = message.get("body", b""), not message.get("more_body", False)
        if not part:
            continue
        if len(body) + len(part) > MAX_BODY_BYTES:
            raise _too_large()
        await share.grow_to(len(body) + len(part))
        body.append(part)


def _fields(request: Request) -> dict[bytes, bytes]:
    """Return the header fields; of several with a name the first."""
    return dict(reversed(request.scope["headers"]))


def _is_json(headers: Mapping[bytes, bytes]) -> bool:
    return headers.get(b"content-type", b"").partition(b";")[0].strip().lower() == b"application/json"


def _too_large() -> RequestError:
    return RequestError(
        f"the body is larger than {MAX_BODY_BYTES >> 20} MiB", code="request_too_large", status=413
    )
