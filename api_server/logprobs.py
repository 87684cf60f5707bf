"""Logprobs in OpenAI's two shapes, and the text of single tokens that both need."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from api_server.openai_types import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TopLogprob
from client.result import TokenLogprob

TokenText: TypeAlias = Callable[[int], str]

REPLACEMENT = "\ufffd"


class TokenTexts:
    """The text of every token by itself, loaded when the first request asks for logprobs."""

    def __init__(self, tokenizer_dir: Path) -> None:
        self._tokenizer_dir = tokenizer_dir
        self._lock = asyncio.Lock()
        self._token_text: TokenText | None = None

    async def get(self) -> TokenText:
        async with self._lock:
            if self._token_text is None:
                self._token_text = await asyncio.to_thread(_load, self._tokenizer_dir)
        return self._token_text


def _load(tokenizer_dir: Path) -> TokenText:
    # Imported here: the tokenizer library is a hundred megabytes that most servers' requests never need.
    from text.incremental import DecoderFactory
    from text.tokenizer import load

    decoders = DecoderFactory(load(tokenizer_dir))
    cache: dict[int, str] = {}

    def token_text(token_id: int) -> str:
        text = cache.get(token_id)
        if text is None:
            decoder = decoders.open((), skip_special_tokens=False)
            text = cache[token_id] = decoder.push(token_id) + decoder.flush()
        return text

    return token_text


def completion_logprobs(
    logprobs: Sequence[TokenLogprob], token_text: TokenText, text_offset: int
) -> CompletionLogprobs:
    """`text_offset`: characters of output before the first of these tokens."""
    columns = CompletionLogprobs([], [], [], [])
    for entry in logprobs:
        token = token_text(entry.token_id)
        columns.tokens.append(token)
        columns.token_logprobs.append(entry.logprob)
        columns.text_offset.append(text_offset)
        # Parts of characters may read the same. The last one stays: the most likely, or the one in the text.
        top = {token_text(token_id): value for token_id, value in reversed(entry.top)}
        columns.top_logprobs.append({**top, token: entry.logprob})
        text_offset += len(token)
    return columns


def chat_logprobs(logprobs: Sequence[TokenLogprob], token_text: TokenText) -> ChatLogprobs:
    content = []
    for entry in logprobs:
        token = token_text(entry.token_id)
        top = [_top_logprob(token_text(token_id), value) for token_id, value in entry.top]
        content.append(ChatTokenLogprob(token, entry.logprob, _bytes_of(token), top))
    return ChatLogprobs(content)


def _top_logprob(token: str, logprob: float) -> TopLogprob:
    return TopLogprob(token, logprob, _bytes_of(token))


def _bytes_of(token: str) -> list[int] | None:
    """Null where the token is a part of a character: its text does not tell its bytes."""
    return None if REPLACEMENT in token else list(token.encode())
