"""Routes /tokenize and /detokenize: token ids of a text, and text of token ids. Nothing is generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from carousel.client.core.request.submission import Prompt, RequestOptions
from carousel.client.core.result import respelled
from carousel.conversation import conversation
from carousel.server.openai.types import MAX_PROMPTS
from carousel.server.request.body import read_body
from carousel.server.request.prompts import template_options
from carousel.server.request.tokenizer import Vocabulary, num_chars
from carousel.server.server_state import ServerState
from carousel.server.sglang.tokenize_types import (
    DetokenizeBody,
    DetokenizeResponse,
    TokenizeBody,
    TokenizeResponse,
)
from carousel.server.spelling.json_list import JsonList, encoded_as
from carousel.server.tenancy.auth import tenant_of
from runtime.base.errors import InvalidRequest

BYTES_PER_TOKEN = 4
"""Bytes of text that count as one token for limits that apply before encoding."""
CALL_IDS = 4
PIECE_IDS = 1 << 13
"""Token ids encoded as JSON in one piece, in which no other thread runs."""
TEMPLATE_FIELDS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")


async def tokenize(request: Request) -> Response:
    server: ServerState = request.app.state.server
    body = await read_body(request, TokenizeBody)
    server.served_model(body.model)
    field = "prompt" if body.messages is None else "messages"
    server.tokenizer.require(field)
    prompts, options = _prompts(body, server.config.template_defaults)
    limits = TokenLimits(server.max_ids, field)
    limits.check_texts(prompts)
    found = [
        await server.tokenizer.run_tool(
            partial(_tokenize_one, prompt, options, limits, with_strings=bool(body.return_token_strs)),
            num_chars(prompt),
            tenant_of(request.scope).name,
        )
        for prompt in prompts
    ]
    is_list, max_len = isinstance(body.prompt, list), server.config.context_length
    return _json(
        _tokenize_response(found, max_len, is_list=is_list, with_strings=bool(body.return_token_strs))
    )


async def detokenize(request: Request) -> Response:
    server: ServerState = request.app.state.server
    body = await read_body(request, DetokenizeBody)
    server.served_model(body.model)
    server.tokenizer.require("tokens")
    tokens: list[Any] = body.tokens
    kinds = set(map(type, tokens))
    if len(kinds) > 1:
        raise InvalidRequest("tokens must be all token ids or all lists of token ids", param="tokens")
    is_list = kinds == {list}
    if is_list and len(tokens) > MAX_PROMPTS:
        raise InvalidRequest(f"tokens: at most {MAX_PROMPTS} lists, got {len(tokens)}", param="tokens")
    lists = tokens if is_list else [tokens]
    TokenLimits(server.max_ids, "tokens").check_ids(lists)
    texts = [
        await server.tokenizer.run_tool(
            partial(_detokenize_one, ids, skip_special_tokens=bool(body.skip_special_tokens)),
            len(ids),
            tenant_of(request.scope).name,
        )
        for ids in lists
    ]
    text = encoded_as(str, b"[", b",".join(texts), b"]") if is_list else encoded_as(str, texts[0])
    return _json(DetokenizeResponse(text, text))


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """Limits of one call, which keep its work and memory at those of a few prompts."""

    max_ids: int
    """Maximum number of ids of one text or list. A call may have four times as many."""
    field: str

    def check_ids(self, lists: Sequence[Sequence[int]]) -> None:
        """Check token ids against the vocabulary. Raises InvalidRequest."""
        self._check(max(map(len, lists)), sum(map(len, lists)), 1, "tokens")

    def check_texts(self, prompts: Sequence[Any]) -> None:
        """Check texts before encoding, at four bytes for each token. Raises InvalidRequest."""
        lengths = [len(each.encode()) if isinstance(each, str) else num_chars(each) for each in prompts]
        self._check(max(lengths), sum(lengths), BYTES_PER_TOKEN, "bytes of text")

    def _check(self, longest: int, together: int, scale: int, unit: str) -> None:
        if longest > self.max_ids * scale or together > CALL_IDS * self.max_ids * scale:
            raise InvalidRequest(
                f"{self.field}: {longest} {unit} in one and {together} together; at most "
                f"{self.max_ids * scale} and {CALL_IDS * self.max_ids * scale} are taken; send less at once",
                param=self.field,
                code="context_length_exceeded",
            )


class _Tokenized(NamedTuple):
    """Encoded prompt."""

    num_ids: int
    ids: bytes
    strings: bytes
    """Strings of the tokens as JSON without the brackets, like `ids`."""


def _tokenize_one(
    prompt: Prompt,
    options: RequestOptions,
    limits: TokenLimits,
    vocabulary: Vocabulary,
    *,
    with_strings: bool,
) -> _Tokenized:
    """Encode a prompt and format its tokens as JSON. Raises RequestError that names the field."""
    try:
        ids = vocabulary.encode(prompt, options, BYTES_PER_TOKEN * limits.max_ids)
    except InvalidRequest as error:
        raise respelled(error, {"prompt": limits.field}) from None
    spelled, strings = JsonList(), JsonList()
    for start in range(0, len(ids), PIECE_IDS):
        piece = ids[start : start + PIECE_IDS]
        spelled.extend(piece)
        if with_strings:
            strings.extend(vocabulary.token_strings(piece))
    return _Tokenized(len(ids), bytes(spelled.data), bytes(strings.data))


def _detokenize_one(ids: Sequence[int], vocabulary: Vocabulary, *, skip_special_tokens: bool) -> bytes:
    """Return the text of token ids as JSON. Raises InvalidRequest for an id beyond the vocabulary."""
    highest, vocab_size = max(ids, default=0), vocabulary.vocab_size
    if highest >= vocab_size:
        raise InvalidRequest(
            f"tokens: id {highest} is not below the vocabulary size {vocab_size}", param="tokens"
        )
    return msgspec.json.encode(vocabulary.decode(ids, skip_special_tokens=skip_special_tokens))


def _tokenize_response(
    found: Sequence[_Tokenized], max_len: int, *, is_list: bool, with_strings: bool
) -> TokenizeResponse:
    ids = [b"[%b]" % each.ids for each in found]
    strings = [b"[%b]" % each.strings for each in found] if with_strings else None
    counts = [each.num_ids for each in found]
    if not is_list:
        shown = None if strings is None else encoded_as(list[str], strings[0])
        return TokenizeResponse(counts[0], max_len, encoded_as(list[int], ids[0]), shown)
    lists = encoded_as(list[list[int]], b"[", b",".join(ids), b"]")
    shown_lists = None if strings is None else encoded_as(list[list[str]], b"[", b",".join(strings), b"]")
    return TokenizeResponse(counts, max_len, lists, shown_lists)


def _prompts(body: TokenizeBody, defaults: dict[str, Any]) -> tuple[list[Prompt], RequestOptions]:
    """Return the prompts and options of a body. Raises InvalidRequest."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("prompt or messages is needed, one of the two", param="prompt")
    if body.messages is not None:
        options = template_options(
            body.add_generation_prompt, body.continue_final_message, body.chat_template_kwargs, defaults
        )
        options["add_special_tokens"] = bool(body.add_special_tokens)
        return [conversation(body.messages)], options
    for name in TEMPLATE_FIELDS:
        if getattr(body, name):
            raise InvalidRequest(f"{name} is for messages", param=name)
    special = True if body.add_special_tokens is None else body.add_special_tokens
    options = RequestOptions(add_special_tokens=special)
    return (list(body.prompt) if isinstance(body.prompt, list) else [body.prompt or ""]), options


def _json(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
