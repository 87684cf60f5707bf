"""Logprobs in OpenAI's shapes: the columns of completions, the entries of chat, and vLLM's of a prompt."""

from __future__ import annotations

from collections.abc import Sequence

from api_server.openai_responses import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from api_server.tokenizer import TokenText, Vocabulary
from client.result import TokenLogprob

REPLACEMENT = "\ufffd"
LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


class TokenSpeller:
    """How one answer shows single tokens. What a token's bytes are is asked once: most come up many times."""

    def __init__(self, vocabulary: Vocabulary, *, as_ids: bool) -> None:
        self.text: TokenText = _id_text if as_ids else vocabulary.token_text
        self._vocabulary = vocabulary
        self._bytes: dict[int, list[int] | None] = {}

    def bytes(self, token_id: int) -> list[int] | None:
        """Null where nothing tells them: a part of a character whose text depends on the tokens beside it.
        Not to be changed.
        """
        if token_id not in self._bytes:
            self._bytes[token_id] = self._find_bytes(token_id)
        return self._bytes[token_id]

    def _find_bytes(self, token_id: int) -> list[int] | None:
        data = self._vocabulary.token_bytes(token_id)
        if data is None:
            text = self._vocabulary.token_text(token_id)
            data = None if REPLACEMENT in text else text.encode()
        return None if data is None else list(data)


def completion_logprobs(
    logprobs: Sequence[TokenLogprob | None],
    token_ids: Sequence[int],
    token_text: TokenText,
    text_offset: int,
    num_top: int,
) -> CompletionLogprobs:
    """`text_offset`: characters before the first of these tokens; None stands for a token without a value."""
    columns = CompletionLogprobs([], [], [], [])
    for entry, token_id in zip(logprobs, token_ids, strict=True):
        token = token_text(token_id)
        columns.tokens.append(token)
        columns.text_offset.append(text_offset)
        text_offset += len(token)
        if entry is None:
            columns.token_logprobs.append(None)
            columns.top_logprobs.append(None)
            continue
        value = finite(entry.logprob)
        columns.token_logprobs.append(value)
        # Parts of characters may read the same. The last one stays: the most likely, or the one in the text.
        top = {token_text(each): finite(logprob) for each, logprob in reversed(entry.top[:num_top])}
        columns.top_logprobs.append({**top, token: value})
    return columns


def chat_logprobs(logprobs: Sequence[TokenLogprob], speller: TokenSpeller) -> ChatLogprobs:
    content = []
    for entry in logprobs:
        top = [
            TopLogprob(speller.text(token_id), finite(value), speller.bytes(token_id))
            for token_id, value in entry.top
        ]
        content.append(
            ChatTokenLogprob(
                speller.text(entry.token_id), finite(entry.logprob), speller.bytes(entry.token_id), top
            )
        )
    return ChatLogprobs(content)


def prompt_logprobs_body(
    logprobs: Sequence[TokenLogprob | None], token_text: TokenText, num_top: int
) -> PromptLogprobs:
    """vLLM's shape: for each token a mapping with itself and the most likely ones, by their ids."""
    body: PromptLogprobs = []
    for entry in logprobs:
        if entry is None:
            body.append(None)
            continue
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(entry.top, 1)}
        values = dict(entry.top[:num_top]) | {entry.token_id: entry.logprob}
        body.append(
            {
                str(token_id): PromptLogprob(finite(value), ranks.get(token_id), token_text(token_id))
                for token_id, value in values.items()
            }
        )
    return body


def finite(logprob: float) -> float:
    return max(logprob, LOWEST)


def _id_text(token_id: int) -> str:
    return f"token_id:{token_id}"
