"""Logprobs in OpenAI's forms (columns of completions, entries of chat) and in vLLM's form for a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias, TypeVar

import msgspec

from carousel.client.core.logprobs import LogprobColumns, PromptLogprobs, TokenLogprob
from carousel.client.core.result import Delta
from carousel.server.openai.response_types import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobsJson,
    TopLogprob,
)
from carousel.server.request.json_list import JsonList, encoded_as
from carousel.server.request.tokenizer import TokenText, Vocabulary

T = TypeVar("T")

NumChars: TypeAlias = Callable[[int, int], int]
"""Function that returns the number of characters of a token in an answer's text, given its id and the number
of characters before it.
"""
PIECE_ENTRIES = 2048
"""Number of log-probabilities that are spelled in one turn of the event loop."""
REPLACEMENT = "\ufffd"
LOWEST = -9999.0
"""Value for minus infinity, which JSON cannot express."""


class TokenSpeller:
    """Speller of single tokens in one answer. It looks a token's bytes up once, because most tokens occur
    many times.
    """

    def __init__(self, vocabulary: Vocabulary, *, as_ids: bool) -> None:
        self.text: TokenText = _id_text if as_ids else vocabulary.token_text
        self._vocabulary = vocabulary
        self._bytes: dict[int, list[int] | None] = {}
        self._lengths: dict[int, int] = {}

    def bytes(self, token_id: int) -> list[int] | None:
        """Return the bytes of a token; None if they are unknown: for a part of a character whose text depends
        on the tokens beside it. The list must not be changed.
        """
        if token_id not in self._bytes:
            self._bytes[token_id] = self._find_bytes(token_id)
        return self._bytes[token_id]

    def num_chars(self, token_id: int, *, skips_special: bool) -> int:
        """Return the number of characters of a token in a text, which may leave out special tokens."""
        own = self._vocabulary.token_text(token_id)
        return (
            0 if own and skips_special and self._vocabulary.is_special(token_id) else self._length(token_id)
        )

    def num_chars_at(self, token_id: int, text: str, offset: int) -> int:
        """Return the number of characters of a token in a text that may lack a special token at that place,
        because the tokenizer has added it.
        """
        own = self._vocabulary.token_text(token_id)
        if own and not text.startswith(own, offset) and self._vocabulary.is_special(token_id):
            return 0
        return self._length(token_id)

    def _length(self, token_id: int) -> int:
        """Return the number of characters of a token. A character of several tokens belongs to the
        first one.
        """
        length = self._lengths.get(token_id)
        if length is None:
            text = self._vocabulary.token_text(token_id)
            data = self._vocabulary.token_bytes(token_id) if REPLACEMENT in text else None
            # Count first bytes of characters; continuation bytes are 0b10xxxxxx.
            length = len(text) if data is None else sum(byte & 0xC0 != 0x80 for byte in data)
            self._lengths[token_id] = length
        return length

    def _find_bytes(self, token_id: int) -> list[int] | None:
        data = self._vocabulary.token_bytes(token_id)
        if data is None:
            text = self._vocabulary.token_text(token_id)
            data = None if REPLACEMENT in text else text.encode()
        return None if data is None else list(data)


def completion_logprobs(
    logprobs: PromptLogprobs,
    token_ids: Sequence[int],
    token_text: TokenText,
    text_offset: int,
    num_top: int,
    num_chars: NumChars,
) -> CompletionLogprobs:
    """Return one column entry for each token; None stands for a token without a value. `text_offset` is the
    number of characters before the first of these tokens, and `num_chars` returns that of a token in the
    text.
    """
    columns = CompletionLogprobs([], [], [], [])
    for entry, token_id in zip(logprobs, token_ids, strict=True):
        token = token_text(token_id)
        columns.tokens.append(token)
        columns.text_offset.append(text_offset)
        text_offset += num_chars(token_id, text_offset)
        if entry is None:
            columns.token_logprobs.append(None)
            columns.top_logprobs.append(None)
            continue
        value = finite(entry.logprob)
        columns.token_logprobs.append(value)
        # Parts of characters may have equal texts. The last one stays: the most likely, or the drawn one.
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


def chat_logprobs_json(logprobs: Sequence[TokenLogprob], speller: TokenSpeller) -> ChatLogprobs:
    """Return what `chat_logprobs` does, encoded: for the many tokens of a whole answer."""
    content = JsonList()
    for piece in in_pieces(logprobs, _num_top(logprobs)):
        content.extend(chat_logprobs(piece, speller).content)
    return encoded_as(ChatLogprobs, b'{"content":[', content.data, b'],"refusal":null}')


def completion_logprobs_json(parts: Iterable[CompletionLogprobs]) -> CompletionLogprobs:
    """Return all parts as one, encoded."""
    columns = {name: JsonList() for name in CompletionLogprobs.__struct_fields__}
    for part in parts:
        for name, column in columns.items():
            column.extend(getattr(part, name))
    fields = [b'"%b":[%b]' % (name.encode(), bytes(column.data)) for name, column in columns.items()]
    return encoded_as(CompletionLogprobs, b"{", b",".join(fields), b"}")


def prompt_logprobs_json(logprobs: PromptLogprobs, token_text: TokenText, num_top: int) -> PromptLogprobsJson:
    """Return logprobs in vLLM's form, encoded: for each token a mapping with itself and the most likely ones,
    by their ids.
    """
    body = JsonList()
    for piece in in_pieces(logprobs, num_top):
        body.extend(_prompt_logprobs(piece, token_text, num_top))
    return encoded_as(PromptLogprobsJson, b"[", body.data, b"]")


def _prompt_logprobs(logprobs: PromptLogprobs, token_text: TokenText, num_top: int) -> PromptLogprobsJson:
    body: PromptLogprobsJson = []
    for entry in logprobs:
        if entry is None:
            body.append(None)
            continue
        assert entry.rank is not None
        ranked = {each: (value, rank) for rank, (each, value) in enumerate(entry.top[:num_top], 1)}
        ranked[entry.token_id] = entry.logprob, entry.rank
        body.append(
            {
                str(token_id): PromptLogprob(finite(value), rank, token_text(token_id))
                for token_id, (value, rank) in ranked.items()
            }
        )
    return body


def in_pieces(entries: Sequence[T], num_top: int) -> Iterator[Sequence[T]]:
    """Yield slices of entries about many tokens, with `num_top` others of each: each slice is a few
    milliseconds' work.
    """
    if isinstance(entries, LogprobColumns):  # whole entries are unpacked, however much is shown
        num_top = max(num_top, entries.num_top)
    size = max(1, PIECE_ENTRIES // (num_top + 1))
    for start in range(0, len(entries), size):
        yield entries[start : start + size]


def delta_pieces(delta: Delta) -> Iterator[Delta]:
    """Split a delta of many tokens with their logprobs. The first part has all the text, and the last one the
    end of the sequence. Most deltas are one part.
    """
    num_top = _num_top(delta.logprobs)
    if len(delta.logprobs) * (num_top + 1) <= PIECE_ENTRIES:
        yield delta
        return
    text, num_taken = delta.text, 0
    for piece in in_pieces(delta.logprobs, num_top):
        part = msgspec.structs.replace(
            delta,
            text=text,
            token_ids=delta.token_ids[num_taken : num_taken + len(piece)],
            logprobs=piece,
        )
        num_taken += len(piece)
        if num_taken < len(delta.logprobs):
            part = msgspec.structs.replace(part, finish_reason=None, matched_stop=None, usage=None)
        yield part
        text = ""


def _num_top(logprobs: Sequence[TokenLogprob]) -> int:
    return len(logprobs[0].top) if logprobs else 0


def finite(logprob: float) -> float:
    return max(logprob, LOWEST)


def _id_text(token_id: int) -> str:
    return f"token_id:{token_id}"
