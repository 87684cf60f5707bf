"""Route /v1/responses: translates a request to a chat, and the answer back."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import msgspec
from msgspec import Raw
from starlette.requests import Request
from starlette.responses import Response

from carousel.client.core.result import respelled
from carousel.server.answer.generation import Generation
from carousel.server.openai.chat import PreparedChat, prepare_chat
from carousel.server.request.body import ignore_hints, read_body
from carousel.server.responses.answer_format import ResponsesFormat
from carousel.server.responses.chat_request import chat_request
from carousel.server.responses.types import (
    SHOWN_PARAMETERS,
    ReasoningShown,
    ResponseBody,
    ResponsesBody,
    ToolSelection,
    empty_list,
)
from carousel.server.server_state import ServerState
from carousel.server.tenancy.auth import tenant_of
from runtime.base.errors import RequestError
from runtime.base.random_ids import random_id


async def create_response(request: Request) -> Response:
    server: ServerState = request.app.state.server
    body = await read_body(request, ResponsesBody)
    take_turn = partial(server.entrance.take_turn, tenant_of(request.scope).name)
    asked = await chat_request(body, take_turn)
    try:
        chat = await prepare_chat(request, asked.chat)
    except RequestError as error:
        raise respelled(error, asked.names) from None
    ignore_hints(request, {asked.names.get(name, name): reason for name, reason in chat.ignored.items()})
    skips_special = chat.asked[0].sampling.skip_special_tokens
    answer = ResponsesFormat(chat.view, _head(body, chat), asked.called, skips_special=skips_special)
    return Generation(server, chat.asked, answer, asked.names.behind(chat.names))


def _head(body: ResponsesBody, chat: PreparedChat) -> ResponseBody:
    """Return the answer as it begins: the settings of the request."""
    sampling = chat.asked[0].sampling
    reasoning = body.reasoning
    return ResponseBody(
        id=f"resp_{random_id()}",
        created_at=int(time.time()),
        status="in_progress",
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        model=chat.view.model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=ReasoningShown(
            None if reasoning is None else reasoning.effort, None if reasoning is None else reasoning.summary
        ),
        safety_identifier=body.safety_identifier,
        text=_shown_text(body),
        tool_choice=_shown_choice(body.tool_choice),
        tools=_on_one_line(body.tools) if _is_given(body.tools) else empty_list(),
        top_logprobs=body.top_logprobs or 0,
        truncation=body.truncation or "disabled",
        user=body.user,
        metadata=body.metadata or {},
        **{name: getattr(sampling, name) for name in SHOWN_PARAMETERS},
    )


def _shown_text(body: ResponsesBody) -> dict[str, Any]:
    text = body.text
    shown: dict[str, Any] = {"format": {"type": "text"}}
    if text is None:
        return shown
    if text.verbosity is not None:
        shown["verbosity"] = text.verbosity
    if text.format is not None:
        fields = {name: getattr(text.format, name) for name in text.format.__struct_fields__}
        shown["format"] = {
            name: _on_one_line(value) if isinstance(value, Raw) else value
            for name, value in fields.items()
            if _is_given(value)
        }
    return shown


def _shown_choice(choice: str | ToolSelection | None) -> Any:
    if choice is None or isinstance(choice, str):
        return choice or "auto"
    fields = {name: getattr(choice, name) for name in choice.__struct_fields__}
    return {name: value for name, value in fields.items() if value is not None}


def _is_given(value: Any) -> bool:
    return value is not None and not (isinstance(value, Raw) and bytes(value) in (b"", b"null"))


def _on_one_line(value: Raw) -> Raw:
    """Return a part of the request without line breaks, which would end the line of an event."""
    return Raw(msgspec.json.format(bytes(value), indent=-1))
