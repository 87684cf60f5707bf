"""Incremental decoding: the text of a sequence, token by token, never decoded from the start again.

Two ways. In a byte-level vocabulary a token stands for fixed bytes, so decoding is a table look-up and an
incremental UTF-8 decoder. In all others what a token stands for depends on its neighbours (a leading space is
dropped at the start of a text, a run of byte tokens is one character), so a short window is decoded with and
without the new token:

    window   | context: text is out | pending: text is held |
              decode(context) = a     decode(context + pending) = a + new text

Either way the text of a whole sequence is what `Tokenizer.decode` gives, and a character of several tokens
comes out with its last token. One exception, in a window: where byte tokens do not make up UTF-8, or spell
the replacement character itself, decoding at once also replaces valid characters beside them, which are out.
"""

from __future__ import annotations

import codecs
import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from runtime.text.codec import ForkingDecoder
from runtime.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
# A character has at most four byte tokens: a text that still ends in a replacement character after eight will
# stay so.
MAX_PENDING_TOKENS = 8


class DecoderFactory:
    """Factory of decoders for one tokenizer, with the tables that they share."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tables: tuple[_ByteTable, ...] = ()
        if tokenizer.is_byte_level:
            every = _ByteTable.of(tokenizer)
            self._tables = (every, every.without(tokenizer.special_ids))

    def open(self, prompt_tail: Sequence[int], *, skip_special_tokens: bool = True) -> ForkingDecoder:
        """Make a decoder for what follows `prompt_tail`, the last few prompt ids, whose own text is not
        returned.
        """
        if self._tables:
            return ByteLevelDecoder(self._tables[skip_special_tokens], prompt_tail)
        return WindowDecoder(self._tokenizer, prompt_tail, skip_special_tokens=skip_special_tokens)

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of these ids by themselves, special tokens included."""
        decoder = self.open((), skip_special_tokens=False)
        return "".join([decoder.push(token) for token in ids]) + decoder.flush()


@dataclass(slots=True, eq=False)
class _ByteTable:
    """Bytes that each id stands for; none for ids that are skipped or unknown."""

    pieces: list[bytes]
    texts: list[str | None]
    """Text of each id if its bytes are whole characters; None if they are part of one, or not UTF-8."""

    @staticmethod
    def of(tokenizer: Tokenizer) -> _ByteTable:
        """Return the table of a tokenizer, special tokens included."""
        pieces = [b""] * tokenizer.vocab_size
        for token_id in tokenizer.vocabulary:
            piece = tokenizer.token_bytes(token_id)
            assert piece is not None, "every token of a byte-level vocabulary stands for bytes"
            pieces[token_id] = piece
        return _ByteTable(pieces, [_text_of(piece) for piece in pieces])

    def incomplete(self, ids: Sequence[int]) -> bytes:
        """Return the bytes at the end of these ids that are the beginning of a character."""
        data = b""
        for token in reversed(ids):
            if 0 <= token < len(self.pieces):
                if self.texts[token]:
                    break  # whole characters, so what is before them does not matter
                data = self.pieces[token] + data
        return data[codecs.utf_8_decode(data, "replace", False)[1] :]

    def without(self, skipped: Collection[int]) -> _ByteTable:
        pieces, texts = self.pieces.copy(), self.texts.copy()
        for token_id in skipped:
            pieces[token_id], texts[token_id] = b"", ""
        return _ByteTable(pieces, texts)


def _text_of(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


class ByteLevelDecoder:
    """Decoder for a byte-level vocabulary: it joins the bytes of tokens and decodes them as UTF-8."""

    __slots__ = ("_pending", "_pieces", "_size", "_texts")

    def __init__(self, table: _ByteTable, prompt_tail: Sequence[int]) -> None:
        self._pieces = table.pieces
        self._texts = table.texts
        self._size = len(table.pieces)
        # A prompt may end inside a character that the output then completes.
        self._pending = table.incomplete(prompt_tail)

    def push(self, token: int) -> str:
        if not 0 <= token < self._size:
            return ""
        if not self._pending:
            text = self._texts[token]
            if text is not None:
                return text
        data = self._pending + self._pieces[token]
        text, num_used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[num_used:]
        return text

    def flush(self) -> str:
        text = self._pending.decode(errors="replace")
        self._pending = b""
        return text

    def fork(self) -> ByteLevelDecoder:
        """Return another decoder that goes on from here."""
        other = ByteLevelDecoder.__new__(ByteLevelDecoder)  # copy.copy takes five times as long
        other._pieces, other._texts, other._size = self._pieces, self._texts, self._size
        other._pending = self._pending
        return other


class WindowDecoder:
    """Decoder for any vocabulary, through a window of a few tokens, whatever the tokens are."""

    __slots__ = ("_context_chars", "_decode", "_is_silent", "_num_context", "_window")

    def __init__(
        self, tokenizer: Tokenizer, prompt_tail: Sequence[int], *, skip_special_tokens: bool
    ) -> None:
        skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        vocabulary = tokenizer.vocabulary
        self._is_silent: Callable[[int], bool] = lambda token: token in skipped or token not in vocabulary
        self._decode: Callable[[list[int]], str] = partial(tokenizer.decode, skip_special_tokens=False)
        self._window = [token for token in prompt_tail if not self._is_silent(token)]
        self._num_context = 0
        self._context_chars = 0
        self._commit()

    def push(self, token: int) -> str:
        if self._is_silent(token):
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        new = text[self._context_chars :]
        is_full = len(self._window) - self._num_context >= MAX_PENDING_TOKENS
        if not new:
            # It may matter to its right neighbour (a space at the start of a text), so it stays while there
            # is room.
            if is_full:
                self._window.pop()
            return ""
        if text.endswith(REPLACEMENT) and not is_full:
            return ""
        del self._window[: self._num_context]
        self._commit()
        return new

    def flush(self) -> str:
        new = self._decode(self._window)[self._context_chars :]
        self._commit()
        return new

    def fork(self) -> WindowDecoder:
        """Return another decoder that goes on from here."""
        other = copy.copy(self)
        other._window = self._window.copy()
        return other

    def _commit(self) -> None:
        """Turn the whole window into context. A character that it leaves incomplete is not returned yet."""
        self._num_context = len(self._window)
        self._context_chars = len(self._decode(self._window).rstrip(REPLACEMENT))
