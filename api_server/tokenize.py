"""/tokenize and /detokenize: what the model's tokenizer makes of a text, and of ids. Nothing is generated."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from api_server.body import read_body
from api_server.openai_types import MAX_PROMPTS, NEUTRAL
from api_server.prompts import conversation, encode_prompts, template_options
from api_server.server_state import ServerState
from api_server.tokenize_types import (
    DetokenizeBody,
    DetokenizeResponse,
    TokenizeBody,
    TokenizeResponse,
)
from client.request_builder import Prompt, RequestOptions
from runtime.errors import InvalidRequest

TEMPLATE_FIELDS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")


async def tokenize(request: Request) -> Response:
    server: ServerState = request.app.state.server
    body = await read_body(request, TokenizeBody)
    server.check_model(body.model)
    server.tokenizer.require("prompt" if body.messages is None else "messages")
    prompts, options = _prompts(body)
    ids = await encode_prompts(server.tokenizer, prompts, options, may_be_empty=True)
    strings = None
    if body.return_token_strs:
        vocabulary = await server.tokenizer.vocabulary()
        strings = [vocabulary.token_strings(each) for each in ids]
    max_len = server.config.context_length
    if isinstance(body.prompt, list):
        answer = TokenizeResponse([len(each) for each in ids], max_len, ids, strings)
    else:
        answer = TokenizeResponse(len(ids[0]), max_len, ids[0], None if strings is None else strings[0])
    return _json(answer)


async def detokenize(request: Request) -> Response:
    server: ServerState = request.app.state.server
    body = await read_body(request, DetokenizeBody)
    server.check_model(body.model)
    server.tokenizer.require("tokens")
    tokens: list[Any] = body.tokens
    kinds = set(map(type, tokens))
    if len(kinds) > 1:
        raise InvalidRequest("tokens must be all token ids or all lists of token ids", param="tokens")
    is_list = kinds == {list}
    if is_list and len(tokens) > MAX_PROMPTS:
        raise InvalidRequest(f"tokens: at most {MAX_PROMPTS} lists, got {len(tokens)}", param="tokens")
    vocab_size = (await server.tokenizer.vocabulary()).vocab_size
    texts = []
    for ids in tokens if is_list else [tokens]:
        highest = max(ids, default=0)
        if highest >= vocab_size:
            raise InvalidRequest(
                f"tokens: id {highest} is not below the vocabulary size {vocab_size}", param="tokens"
            )
        texts.append(await server.tokenizer.decode(ids, skip_special_tokens=bool(body.skip_special_tokens)))
    text = texts if is_list else texts[0]
    return _json(DetokenizeResponse(text, text))


def _prompts(body: TokenizeBody) -> tuple[list[Prompt], RequestOptions]:
    """Raises InvalidRequest."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("prompt or messages is needed, one of the two", param="prompt")
    if body.messages is not None:
        if body.add_special_tokens:
            raise InvalidRequest(
                "add_special_tokens is for a prompt: the chat template of messages writes its own",
                param="add_special_tokens",
            )
        options = template_options(
            body.add_generation_prompt, body.continue_final_message, body.chat_template_kwargs
        )
        return [conversation(body.messages, NEUTRAL)], options
    for name in TEMPLATE_FIELDS:
        if getattr(body, name):
            raise InvalidRequest(f"{name} is for messages", param=name)
    special = True if body.add_special_tokens is None else body.add_special_tokens
    options = RequestOptions(add_special_tokens=special)
    return (list(body.prompt) if isinstance(body.prompt, list) else [body.prompt or ""]), options


def _json(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
