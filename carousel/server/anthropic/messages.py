"""Routes /v1/messages and /v1/messages/count_tokens: chat requests in Anthropic's form."""

from __future__ import annotations

from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from carousel.client.core.request.submission import Submission
from carousel.client.core.result import respelled
from carousel.server.answer.generation import Generation
from carousel.server.anthropic.message_format import MessagesFormat
from carousel.server.anthropic.responses import CountTokensResponse
from carousel.server.anthropic.translation import RENAMED, Translation, translate
from carousel.server.anthropic.types import CountTokensBody, MessagesBody
from carousel.server.openai.chat import PreparedChat, prepare_chat
from carousel.server.request.body import ignore_hints, read_body
from carousel.server.request.tokenizer import Vocabulary, num_chars
from carousel.server.server_state import ServerState
from carousel.server.sglang.tokenize import BYTES_PER_TOKEN, TokenLimits
from carousel.server.tenancy.auth import tenant_of
from runtime.base.errors import InvalidRequest


async def create_message(request: Request) -> Response:
    body = await read_body(request, MessagesBody)
    chat = translate(body)
    prepared = await _prepare(request, chat)
    answer = MessagesFormat(prepared.view, body.max_tokens, request.state.request_id)
    return Generation(prepared.server, prepared.asked, answer, chat.names(prepared.names))


async def count_tokens(request: Request) -> Response:
    server: ServerState = request.app.state.server
    body = await read_body(request, CountTokensBody)
    server.tokenizer.require("messages")
    (asked,) = (await _prepare(request, translate(body))).asked
    limits = TokenLimits(server.max_ids, "messages")
    limits.check_texts([asked.prompt])
    count = partial(_count, asked, BYTES_PER_TOKEN * limits.max_ids)
    size = num_chars(asked.prompt) + len(asked.options.get("tools") or b"")
    num_tokens = await server.tokenizer.run_tool(count, size, tenant_of(request.scope).name)
    return Response(msgspec.json.encode(CountTokensResponse(num_tokens)), media_type="application/json")


async def _prepare(request: Request, chat: Translation) -> PreparedChat:
    """Return what a chat request asks for. Raises RequestError by the names of the Messages API."""
    try:
        prepared = await prepare_chat(request, chat.body)
    except InvalidRequest as error:
        raise chat.error(error) from None
    ignore_hints(request, {RENAMED.get(name, name): reason for name, reason in prepared.ignored.items()})
    return prepared


def _count(asked: Submission, max_chars: int, vocabulary: Vocabulary) -> int:
    """Return the number of tokens of a prompt. Raises InvalidRequest."""
    try:
        return len(vocabulary.encode(asked.prompt, asked.options, max_chars))
    except InvalidRequest as error:
        raise respelled(error, {"prompt": "messages"}) from None
