"""TextInParts: encodes a long text in parts. The library holds the interpreter while it lists the ids of a
text, 50 ms for a million, and needs 150 bytes for each.

Where a part is cut, its last tokens may be other ones than those of the whole text. So the next part begins
some hundred tokens before that, at the beginning of a word, and takes over where both agree. Its first tokens
may be other ones, too, if the tokenizer writes a space before a text. Then it takes over some tokens later.

This gives the ids of the whole text. Words are encoded each by itself, and must be the same ones in parts
that agree: if a tokenizer divides a number into threes, where a part begins decides which. Within a word,
which some tokenizers let be as long as the text, byte pair encoding is such that tokens belong to the whole
if each two neighbours belong together (shown for the crate `bpe` of GitHub's rust-gems), and neighbours on
both sides of a join are neighbours in a part. A part that does not agree with the next one is made longer.
This happens to parts of few tokens and, with some tokenizers, to long runs of characters that are not in the
vocabulary. It does not hold for tokenizers whose words depend on a text far from them (`has_short_rules`).
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from tokenizers import Encoding
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from runtime.wire.format import IntArray

Encode: TypeAlias = Callable[[str], IntArray]
"""Function of a text that returns its ids, int32, without those that the tokenizer adds around a text."""
EncodePlaces: TypeAlias = Callable[[str], tuple[Encoding, IntArray]]
"""Function of a text that returns the library's encoding, with the places of tokens, and the same ids. It
takes twice as long.
"""
PART_CHARS = 1 << 15
"""Number of characters of a part: at most 131,072 tokens, if each is an emoji of four bytes."""
OVERLAP_CHARS = 1 << 10, 1 << 13, 1 << 15
"""Number of a part's last characters in which the next one begins; more if parts do not agree there."""
SPACES_ALONE = re.compile(r"(?:[ +*]|\\[snrt]|\{\d*,?\d*\})*")
"""Expressions that match nothing but white space."""
GROWTH = 4
"""Factor by which a part becomes longer if it does not agree with the next one."""
CUT_TOKENS = 64
"""Number of a part's last tokens that may differ because it ends there."""
OTHER_CHARACTER = "\u4e2d"
"""Character that stands for no byte."""
NUM_AGREEING = 16
"""Number of tokens before a join, and behind it, that must be the same in both parts."""


class _Part(NamedTuple):
    """Encoded part of a text."""

    start: int
    """Place of its first character in the text."""
    stop: int
    ids: IntArray


@dataclass(frozen=True, slots=True)
class _Overlap:
    """Encoded part of a text, with the places of its tokens."""

    start: int
    stop: int
    encoding: Encoding
    ids: IntArray

    def last_words(self) -> IntArray:
        """Return how far from the end each token but the first begins, or 0 if it begins no word; the last
        token first.
        """
        words = np.array([-1 if word is None else word for word in self.encoding.word_ids], np.int32)
        places = np.array([place for place, _ in self.encoding.offsets], np.int32)[1:]
        return np.where(np.diff(words) != 0, self.stop - self.start - places, 0)[::-1]

    def begins_word(self, token: int) -> bool:
        word_of = self.encoding.token_to_word
        return self.begins_character(token) and word_of(token) != word_of(token - 1)

    def begins_character(self, token: int) -> bool:
        """Return True if no earlier token has part of this token's first character."""
        return token > 0 and self._span(token - 1)[1] <= self._span(token)[0]

    def place_of(self, token: int) -> int:
        """Return the place in the text of a token's first character."""
        return self.start + self._span(token)[0]

    def token_at(self, place: int) -> int | None:
        """Return the token that begins with the character at this place of the text, of which no earlier one
        has part; None if there is none.
        """
        token: int | None = self.encoding.char_to_token(place - self.start)
        if token is None or self.place_of(token) != place or not self.begins_character(token):
            return None
        return token

    def _span(self, token: int) -> tuple[int, int]:
        span: tuple[int, int] | None = self.encoding.token_to_chars(token)
        return span or (0, 0)


class _Join(NamedTuple):
    """Place where two parts meet."""

    end: int
    """Number of tokens of the first part up to there."""
    following: _Part
    begin: int
    """First token of the following part that is used."""


class _LastIds:
    """Ids that are added one piece after the other, of which the last ones are kept."""

    def __init__(self, num_last: int | None) -> None:
        self._num_last = num_last
        self._pieces: deque[IntArray] = deque()
        self._num_kept = 0
        self.num_all = 0

    def add(self, ids: IntArray) -> None:
        self._pieces.append(ids.copy())  # a slice would keep the ids around it
        self._num_kept += len(ids)
        self.num_all += len(ids)
        if self._num_last is not None:
            while len(self._pieces) > 1 and self._num_kept - len(self._pieces[0]) >= self._num_last:
                self._num_kept -= len(self._pieces.popleft())

    def joined(self) -> IntArray:
        """Return the ids that are kept. They are copied piece by piece, because numpy holds the interpreter
        meanwhile.
        """
        ids, end = np.empty(self._num_kept, np.int32), 0
        for piece in self._pieces:
            ids[end : end + len(piece)] = piece
            end += len(piece)
        return last_ids(ids, self._num_last)


class TextInParts:
    """Text that is encoded in parts, with one tokenizer."""

    def __init__(
        self,
        text: str,
        encode: Encode,
        encode_places: EncodePlaces,
        *,
        may_cut_words: bool,
        part_chars: int = PART_CHARS,
    ) -> None:
        """may_cut_words: False if parts are to meet between words only; see the function of that name."""
        self._text = text
        self._encode = encode
        self._encode_places = encode_places
        self._may_cut_words = may_cut_words
        self._part_chars = part_chars

    def ids(self, num_last: int | None = None) -> tuple[IntArray, int]:
        """Return the last ids of the text, int32, and the number of all. num_last: maximum; None: all."""
        ids = _LastIds(num_last)
        part, first = self._part(0, self._part_chars), 0
        while part.stop < len(self._text):
            join = self._join(part, first)
            if join is not None:
                ids.add(part.ids[first : join.end])
                part, first = join.following, join.begin
                continue
            longer = self._part(part.start, GROWTH * (part.stop - part.start))
            if _num_equal(part.ids, longer.ids) < min(first + NUM_AGREEING, len(part.ids)):
                whole = self._encode(self._text)
                return last_ids(whole, num_last), len(whole)
            part = longer
        ids.add(part.ids[first:])
        return ids.joined(), ids.num_all

    def _part(self, start: int, num_chars: int) -> _Part:
        stop = min(start + num_chars, len(self._text))
        return _Part(start, stop, self._encode(self._text[start:stop]))

    def _join(self, part: _Part, first: int) -> _Join | None:
        """Return the join with the part that follows; None if those do not agree, as when they have few
        tokens. first: the part's first token that is used.
        """
        for num_chars in OVERLAP_CHARS:
            overlap = self._overlap(max(part.stop - num_chars, (part.start + part.stop) // 2), part.stop)
            num_before = len(part.ids) - len(overlap.ids)
            num_same = min(
                _num_equal(part.ids[::-1], overlap.ids[::-1]), self._num_in_same_words(part, overlap)
            )
            fewest = max(len(overlap.ids) - num_same, first - num_before)
            tokens = range(fewest + NUM_AGREEING, len(overlap.ids) - CUT_TOKENS - NUM_AGREEING)
            begin = next(filter(overlap.begins_word, tokens), None) or next(self._cuts(overlap, tokens), None)
            if begin is None:
                continue
            following = self._part(overlap.place_of(begin), self._part_chars)
            head = self._overlap(following.start, part.stop)
            num_equal = _num_equal(head.ids, following.ids)
            for end in self._cuts(overlap, range(begin + NUM_AGREEING, tokens.stop)):
                place = head.token_at(overlap.place_of(end))
                if place is not None and _agree(overlap.ids, end, head.ids[:num_equal], place):
                    return _Join(num_before + end, following, place)
        return None

    def _num_in_same_words(self, part: _Part, overlap: _Overlap) -> int:
        """Return how many of the last tokens are in the same words in a part and in its overlap."""
        shifted = self._overlap(overlap.start + 1, part.stop)
        words = overlap.last_words()
        num_same = _num_equal(words, shifted.last_words())
        if num_same > len(words) // 2:  # nearly always: where the overlap begins decides nothing
            return num_same
        return _num_equal(words, self._overlap(part.start, part.stop).last_words())

    def _overlap(self, start: int, stop: int) -> _Overlap:
        return _Overlap(start, stop, *self._encode_places(self._text[start:stop]))

    def _cuts(self, overlap: _Overlap, tokens: range) -> Iterator[int]:
        """Yield the tokens before which parts may meet."""
        may_cut = overlap.begins_character if self._may_cut_words else overlap.begins_word
        return filter(may_cut, tokens)


def last_ids(ids: IntArray, num_last: int | None) -> IntArray:
    """Return the last num_last ids, or all if there are fewer or it is None."""
    return ids if num_last is None else ids[max(0, len(ids) - num_last) :]


def _agree(left: IntArray, left_token: int, right: IntArray, right_token: int) -> bool:
    """Return True if the same ids are around two tokens."""
    if not NUM_AGREEING <= right_token <= len(right) - NUM_AGREEING:
        return False
    here = left[left_token - NUM_AGREEING : left_token + NUM_AGREEING]
    return np.array_equal(here, right[right_token - NUM_AGREEING : right_token + NUM_AGREEING])


def _num_equal(left: IntArray, right: IntArray) -> int:
    """Return how many ids are the same at the beginning of both."""
    size = min(len(left), len(right))
    differ = np.flatnonzero(left[:size] != right[:size])
    return int(differ[0]) if len(differ) else size


def has_short_rules(backend: Backend) -> bool:
    """Return False if the normalizer replaces what an expression matches, other than white space: a match may
    be as long as the text, such as all between two brackets, and a part does not show both ends.
    """
    if backend.normalizer is None:
        return True
    state: dict[str, Any] = json.loads(backend.normalizer.__getstate__())
    patterns = [step.get("pattern", {}).get("Regex") for step in state.get("normalizers", [state])]
    return all(pattern is None or SPACES_ALONE.fullmatch(pattern) for pattern in patterns)


def may_cut_words(backend: Backend) -> bool:
    """Return True if parts may meet within a word.

    Only with byte pair encoding do equal neighbours tell that tokens belong to the whole word; elsewhere
    (Unigram) rounded sums decide between equally likely tokens. A model that leaves out characters which are
    not in its vocabulary does not do either: the places of tokens behind them in the same word are wrong.
    """
    model = backend.model
    if not isinstance(model, BPE):
        return False
    if model.unk_token is not None:
        return True
    if model.byte_fallback:
        return all(backend.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))
    return _writes_bytes(backend) and all(
        backend.token_to_id(char) is not None for char in ByteLevel.alphabet()
    )


def _writes_bytes(backend: Backend) -> bool:
    """Return True if words are written with a character for each byte."""
    text = OTHER_CHARACTER
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    if backend.pre_tokenizer is not None:
        text = "".join(word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text))
    return set(text) <= set(ByteLevel.alphabet())
