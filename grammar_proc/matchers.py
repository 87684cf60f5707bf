"""Matchers: where the output of each guided sequence stands in its guide.

A matcher's state follows from the guide and the ids alone, so whoever has those can have it made again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from grammar_proc.backend import BackendVocabulary, Matcher
from grammar_proc.vocabulary import WORD_BITS, reason_of
from runtime.base.errors import InvalidRequest
from runtime.base.mask_memory import MaskMemory
from runtime.wire.format import TOKEN_BYTES, IntArray, unpack_ids
from runtime.wire.guide import MatcherNews, MatcherState

FAIR_STEP_S = 0.025
"""Time of the processor that a token of one sequence may take: all others wait for it."""
MAX_EXCESS_S = 0.5
"""Time beyond that which the tokens of a sequence may take together. So may its guesses, apart from these."""


@dataclass(slots=True, eq=False)
class _Entry:
    matcher: Matcher
    num_tokens: int
    place: MaskPlace | None
    """Where its masks are written; None: they are sent."""
    excess_s: float = 0.0
    guesses: bytes = b""
    """Ids that a step verifies behind its tokens, packed."""
    guess_excess_s: float = 0.0


class MaskPlace(NamedTuple):
    """Slots of one sequence, for the masks of its next token and behind its guesses."""

    memory: MaskMemory
    slot: int
    num_slots: int = 1


class _Behind(NamedTuple):
    """State behind a guess."""

    mask: IntArray
    is_complete: bool


class GuideBroken(InvalidRequest):
    """A matcher cannot go on."""

    def __init__(self, handle: bytes, message: str) -> None:
        super().__init__(message, code="guide_too_complex")
        self.handle = handle


class Matchers:
    """By handle."""

    def __init__(
        self, vocabulary: BackendVocabulary[Any], on_progress: Callable[[], None] = lambda: None
    ) -> None:
        """`on_progress`: called before what may take a while."""
        self._vocabulary = vocabulary
        self._on_progress = on_progress
        self._entries: dict[bytes, _Entry] = {}
        self._changed: dict[bytes, None] = {}
        """Sequences whose state is to be told."""
        self._times_each = False
        """The last masks took long: time those that follow one by one, to know whose do."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def has_news(self) -> bool:
        return bool(self._changed)

    def open(
        self,
        handle: bytes,
        start: Matcher,
        output_ids: bytes,
        place: MaskPlace | None = None,
    ) -> None:
        """Begin where `start` is, and follow the output that there is. `place`: where masks are written;
        None: they are sent. Raises InvalidRequest.
        """
        ids = _ids(output_ids)
        if ids is None:
            self.close(handle)
            raise _not_resumable()
        entry = _Entry(start.deep_copy(), len(ids), place)
        if ids and not self._consume(entry, ids):
            self.close(handle)
            raise _not_resumable()
        self._entries[handle] = entry
        self._changed[handle] = None

    def advance(self, news: MatcherNews) -> None:
        """Follow new ids. What is of an earlier matcher changes nothing."""
        entry, ids = self._entries.get(news.handle), _ids(news.ids)
        if entry is None or ids is None or entry.num_tokens + len(ids) != news.num_tokens:
            return
        entry.num_tokens, entry.guesses = news.num_tokens, news.guesses
        if ids:
            self._consume(entry, ids)  # a mistake shows as an error of the matcher
        self._changed[news.handle] = None

    def start_of(self, handle: bytes) -> Matcher | None:
        """Return the matcher of a sequence, not to be changed; None: it has none."""
        entry = self._entries.get(handle)
        return None if entry is None else entry.matcher

    def close(self, handle: bytes) -> None:
        self._entries.pop(handle, None)
        self._changed.pop(handle, None)

    def clear(self) -> None:
        self._entries.clear()
        self._changed.clear()

    def news(self, most: int) -> Iterator[MatcherState | GuideBroken]:
        """Return the states of at most so many that have changed; those that cannot go on are closed. Those
        without guesses come first, apart from the others, which take longer.
        """
        plain = [handle for handle in self._changed if not self._entries[handle].guesses]
        handles = (plain or list(self._changed))[:most]
        entries = [self._entries[handle] for handle in handles]
        masks = self._masks(entries)
        for handle, entry, mask in zip(handles, entries, masks, strict=True):
            del self._changed[handle]
            if entry.matcher.is_error() or entry.excess_s > MAX_EXCESS_S:
                self.close(handle)
                reason = reason_of(entry.matcher) or "it takes too long to find what may come next"
                yield GuideBroken(handle, f"the guide is too complex: {reason}")
                continue
            yield self._state(handle, entry, mask)

    def _state(self, handle: bytes, entry: _Entry, mask: IntArray) -> MatcherState:
        masks, are_complete = [_kept(mask, entry.place)], [entry.matcher.is_accepting()]
        is_short = False
        if entry.guesses:
            for number, behind in enumerate(self._behind_guesses(entry, mask), 1):
                if behind is None:
                    is_short = True
                    break
                masks.append(_kept(behind.mask, entry.place, number))
                are_complete.append(behind.is_complete)
        return MatcherState(
            handle, entry.num_tokens, tuple(masks), tuple(are_complete), entry.guesses, is_short
        )

    def _behind_guesses(self, entry: _Entry, mask: IntArray) -> Iterator[_Behind | None]:
        """Find what may follow each guess, up to the first one that may not come itself. `mask`: what may
        come before them. None: that takes too long, or cannot be found.

        The time that it takes ends no sequence, as the guesses may be wrong.
        """
        matcher, began = entry.matcher.deep_copy(), time.thread_time()
        for guess in _ids(entry.guesses) or ():
            if not _allows(mask, guess):
                return
            spent_s = time.thread_time() - began
            if spent_s > FAIR_STEP_S or entry.guess_excess_s > MAX_EXCESS_S:
                yield None
                return
            self._on_progress()
            is_right = matcher.consume_token(guess)
            mask, _ = self._vocabulary.timed_mask(matcher)
            entry.guess_excess_s += max(0.0, time.thread_time() - began - spent_s - FAIR_STEP_S)
            if not is_right or matcher.is_error():
                yield None
                return
            yield _Behind(mask, matcher.is_accepting())

    def _consume(self, entry: _Entry, ids: list[int]) -> bool:
        self._on_progress()
        began = time.thread_time()
        matches = entry.matcher.consume_tokens(ids)
        entry.excess_s += max(0.0, time.thread_time() - began - FAIR_STEP_S * len(ids))
        return matches

    def _masks(self, entries: Sequence[_Entry]) -> Sequence[IntArray]:
        self._on_progress()
        if not self._times_each:
            began = time.monotonic()
            masks = self._vocabulary.masks([entry.matcher for entry in entries])
            self._times_each = time.monotonic() - began > FAIR_STEP_S
            return list(masks)
        self._times_each = False
        made: list[IntArray] = []
        for entry in entries:
            self._on_progress()
            mask, seconds = self._vocabulary.timed_mask(entry.matcher)
            made.append(mask)
            entry.excess_s += max(0.0, seconds - FAIR_STEP_S)
            self._times_each = self._times_each or seconds > FAIR_STEP_S
        return made


def _kept(mask: IntArray, place: MaskPlace | None, number: int = 0) -> bytes | int:
    """Write a mask to its slot, if there is one of this number: see MatcherState.masks."""
    if place is not None and number < place.num_slots:
        memory, slot = place.memory, place.slot + number
        memory.write(slot, mask.view(np.uint8).data)
        return slot if np.frombuffer(memory.slot(slot), np.uint8).any() else b""
    return mask.tobytes() if mask.any() else b""


def _allows(mask: IntArray, token: int) -> bool:
    word, bit = divmod(token, WORD_BITS)
    return word < len(mask) and bool(mask.item(word) >> bit & 1)


def _not_resumable() -> InvalidRequest:
    return InvalidRequest("resume: the output that there is does not match the guide", param="resume")


def _ids(packed: bytes) -> list[int] | None:
    """None for what are no ids, which no scheduler sends."""
    if len(packed) % TOKEN_BYTES:
        return None
    ids: list[int] = unpack_ids(packed).tolist()
    return None if ids and min(ids) < 0 else ids
