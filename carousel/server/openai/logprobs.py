"""Logprobs in OpenAI's forms (columns of completions, entries of chat) and in vLLM's form for a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from carousel.client.core.logprobs import PromptLogprobs, TokenLogprob, packed_logprobs
from carousel.client.core.result import Delta
from carousel.server.openai.response_types import ChatLogprobs, CompletionLogprobs
from carousel.server.request.tokenizer import TokenText, Vocabulary
from carousel.server.spelling.json_list import encoded_as
from carousel.server.spelling.large_parts import listed
from carousel.server.spelling.logprob_json import (
    PIECE_ENTRIES,
    NumberFrame,
    entries_json,
    in_pieces,
    numbers_json,
    ranked_json,
    text_objects_json,
)
from carousel.server.spelling.token_table import TokenTable

NumChars: TypeAlias = Callable[[int, int], int]
"""Function that returns the number of characters of a token in an answer's text, given its id and the number
of characters before it.
"""
REPLACEMENT = "\ufffd"

_encode = msgspec.json.Encoder().encode


class TokenSpeller:
    """Speller of single tokens in one answer. It looks a token's bytes up once, because most tokens occur
    many times.
    """

    def __init__(self, vocabulary: Vocabulary, *, as_ids: bool) -> None:
        self.text: TokenText = _id_text if as_ids else vocabulary.token_text
        self._vocabulary = vocabulary
        of, how = vocabulary.tables.of, "ids" if as_ids else "texts"
        self.names: TokenTable[bytes] = of(f"names, {how}", self._name)
        """Texts as JSON."""
        self.chat: TokenTable[NumberFrame] = of(f"chat, {how}", self._chat_frame)
        """JSON around a token's logprob in a chat."""
        self.items: TokenTable[NumberFrame] = of(f"items, {how}", self._item_frame)
        """JSON around a token's logprob in an answer of /v1/responses."""
        self.ranked: TokenTable[NumberFrame] = of(f"ranked, {how}", self._ranked_frame)
        """The same in the logprobs of a prompt in vLLM's form, without the rank."""
        self._lengths: TokenTable[int] = of("lengths", self._find_length)

    def _name(self, token_id: int) -> bytes:
        return _encode(self.text(token_id))

    def _chat_frame(self, token_id: int) -> NumberFrame:
        known = _encode(self._find_bytes(token_id))
        return b'{"token":%b,"logprob":' % self.names[token_id], b',"bytes":%b}' % known

    def _item_frame(self, token_id: int) -> NumberFrame:
        known = _encode(self._find_bytes(token_id) or [])
        return b'{"token":%b,"bytes":%b,"logprob":' % (self.names[token_id], known), b"}"

    def _ranked_frame(self, token_id: int) -> NumberFrame:
        return b'"%d":{"logprob":' % token_id, b',"decoded_token":%b}' % self.names[token_id]

    def num_chars(self, token_id: int, *, skips_special: bool) -> int:
        """Return the number of characters of a token in a text, which may leave out special tokens."""
        own = self._vocabulary.token_text(token_id)
        return (
            0 if own and skips_special and self._vocabulary.is_special(token_id) else self._lengths[token_id]
        )

    def num_chars_at(self, token_id: int, text: str, offset: int) -> int:
        """Return the number of characters of a token in a text that may lack a special token at that place,
        because the tokenizer has added it.
        """
        own = self._vocabulary.token_text(token_id)
        if own and not text.startswith(own, offset) and self._vocabulary.is_special(token_id):
            return 0
        return self._lengths[token_id]

    def _find_length(self, token_id: int) -> int:
        """Return the number of characters of a token. A character of several tokens belongs to the
        first one.
        """
        text = self._vocabulary.token_text(token_id)
        data = self._vocabulary.token_bytes(token_id) if REPLACEMENT in text else None
        # Count first bytes of characters; continuation bytes are 0b10xxxxxx.
        return len(text) if data is None else sum(byte & 0xC0 != 0x80 for byte in data)

    def _find_bytes(self, token_id: int) -> list[int] | None:
        """Return the bytes of a token; None if they are unknown: for a part of a character whose text depends
        on the tokens beside it.
        """
        data = self._vocabulary.token_bytes(token_id)
        if data is None:
            text = self._vocabulary.token_text(token_id)
            data = None if REPLACEMENT in text else text.encode()
        return None if data is None else list(data)


class ShownTokens(NamedTuple):
    """Tokens of which the columns of a completion's logprobs tell, some of them without values."""

    logprobs: PromptLogprobs
    ids: Sequence[int]
    num_chars: NumChars

    def pieces(self, num_top: int) -> Iterator[ShownTokens]:
        start = 0
        for piece in in_pieces(self.logprobs, num_top):
            yield ShownTokens(piece, self.ids[start : start + len(piece)], self.num_chars)
            start += len(piece)


class CompletionColumns:
    """Columns of logprobs of one choice, with an entry for each token; null stands for a token without a
    value.
    """

    def __init__(self, speller: TokenSpeller, num_top: int) -> None:
        self._speller = speller
        self._num_top = num_top
        self._offset = 0
        """Number of characters of the tokens so far."""

    def of(self, tokens: ShownTokens) -> CompletionLogprobs:
        """Return the columns of the next tokens, encoded."""
        columns = [self._offsets(tokens), *(column(tokens) for column in self._others())]
        return encoded_as(CompletionLogprobs, _OBJECT % tuple(columns))

    def pieces(self, parts: Sequence[ShownTokens]) -> Iterator[bytes]:
        """Yield the columns of all tokens as JSON, one column after another."""
        self._offset = 0
        names = _OBJECT.split(b"[%b]")
        for name, column in zip(names, [self._offsets, *self._others()], strict=False):
            yield name
            yield from listed(
                column(piece) for part in parts for piece in part.pieces(self._num_top) if piece.ids
            )
        yield names[-1]

    def _others(self) -> list[Callable[[ShownTokens], bytes]]:
        """Return the columns behind the first one, in their order in CompletionLogprobs."""
        return [self._values, self._names, self._tops]

    def _offsets(self, tokens: ShownTokens) -> bytes:
        offsets: list[int] = []
        for token_id in tokens.ids:
            offsets.append(self._offset)
            self._offset += tokens.num_chars(token_id, self._offset)
        return _encode(offsets)[1:-1]

    def _values(self, tokens: ShownTokens) -> bytes:
        columns = packed_logprobs(tokens.logprobs)
        return b",".join([b"null"] * columns.num_none + numbers_json(columns.arrays().values))

    def _names(self, tokens: ShownTokens) -> bytes:
        return b",".join(map(self._speller.names.__getitem__, tokens.ids))

    def _tops(self, tokens: ShownTokens) -> bytes:
        return text_objects_json(tokens.logprobs, tokens.ids, self._speller.names, self._num_top)


_OBJECT = b'{"text_offset":[%b],"token_logprobs":[%b],"tokens":[%b],"top_logprobs":[%b]}'


def chat_logprobs(logprobs: Sequence[TokenLogprob], speller: TokenSpeller) -> ChatLogprobs:
    """Return the logprobs of a few tokens, encoded."""
    return encoded_as(ChatLogprobs, *chat_pieces(logprobs, speller))


def chat_pieces(logprobs: Sequence[TokenLogprob], speller: TokenSpeller) -> Iterator[bytes]:
    """Yield the logprobs of many tokens as JSON."""
    yield b'{"content":'
    pieces = in_pieces(logprobs, num_top_of(logprobs))
    yield from listed(entries_json(piece, speller.chat) for piece in pieces)
    yield b',"refusal":null}'


def item_pieces(logprobs: Sequence[TokenLogprob], speller: TokenSpeller) -> Iterator[bytes]:
    """Yield the list of logprobs of an item of a response as JSON."""
    pieces = in_pieces(logprobs, num_top_of(logprobs))
    return listed(entries_json(piece, speller.items) for piece in pieces)


def prompt_pieces(logprobs: PromptLogprobs, speller: TokenSpeller, num_top: int) -> Iterator[bytes]:
    """Yield the logprobs of a prompt in vLLM's form: for each token an object with itself and the most likely
    ones, by their ids.
    """
    return listed(ranked_json(piece, speller.ranked, num_top) for piece in in_pieces(logprobs, num_top))


def delta_pieces(delta: Delta) -> Iterator[Delta]:
    """Split a delta of many tokens with their logprobs. The first part has all the text, and the last one the
    end of the sequence. Most deltas are one part.
    """
    num_top = num_top_of(delta.logprobs) if delta.logprobs else 0
    if len(delta.logprobs) * (num_top + 1) <= PIECE_ENTRIES:
        yield delta
        return
    text, num_taken, num_all = delta.text, 0, len(delta.logprobs)
    pieces = in_pieces(delta.logprobs, num_top)
    while num_taken < num_all:
        piece = next(pieces)
        part = msgspec.structs.replace(
            delta,
            text=text,
            token_ids=delta.token_ids[num_taken : num_taken + len(piece)],
            logprobs=piece,
        )
        num_taken += len(piece)
        if num_taken < num_all:
            part = msgspec.structs.replace(part, finish_reason=None, matched_stop=None, usage=None)
        else:
            del delta, pieces  # the events at the end wait, and need no more of them than the last part
        yield part
        text = ""


def num_top_of(logprobs: PromptLogprobs) -> int:
    """Return the number of most likely tokens of each entry."""
    return packed_logprobs(logprobs[-1:]).num_top


def _id_text(token_id: int) -> str:
    return f"token_id:{token_id}"
