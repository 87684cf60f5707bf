"""StateMaker: follows outputs in their guides and makes masks, and measures the time that these cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from grammar_proc.backend import BackendVocabulary, Matcher
from grammar_proc.guides.guide_memory import HeapMeter
from grammar_proc.matching.matcher_entry import MaskPlace, MatcherEntry
from grammar_proc.vocabulary import WORD_BITS, is_used_up, reason_of
from runtime.base.errors import InvalidRequest
from runtime.wire.format import TOKEN_BYTES, IntArray, unpack_ids
from runtime.wire.guide import MatcherState

FAIR_STEP_S = 0.025
"""CPU seconds that one token of a sequence may take without being counted. All other sequences wait
meanwhile.
"""
MAX_EXCESS_S = 0.5
"""CPU seconds beyond FAIR_STEP_S that the tokens of a sequence may take together. Its guesses have as much,
counted separately.
"""


class _Behind(NamedTuple):
    """State after a guess."""

    mask: IntArray
    is_complete: bool


class StateMaker:
    def __init__(
        self, vocabulary: BackendVocabulary[Any], meter: HeapMeter, on_progress: Callable[[], None]
    ) -> None:
        """on_progress: called before operations that may take long."""
        self._vocabulary = vocabulary
        self._meter = meter
        self._on_progress = on_progress
        self._times_each = False
        """True if the last masks took long: the next ones are timed one by one, to find the sequence that
        causes it.
        """

    def follow(self, entry: MatcherEntry) -> float:
        """Follow the new ids of a sequence, all of its output if it has no matcher. Returns the CPU time of
        this thread afterwards.
        """
        num_new, entry.num_new = entry.num_new, 0
        if entry.matcher is not None:
            return self._consume(entry, ids_of(bytes(entry.ids[-num_new * TOKEN_BYTES :])) or [])
        assert entry.copy is not None
        self._meter.touch((entry.copy,))
        self._on_progress()
        began = time.thread_time()
        entry.matcher = self._vocabulary.follow(entry.copy.start, ids_of(bytes(entry.ids)) or [])
        ended = time.thread_time()
        entry.excess_s += max(0.0, ended - began - FAIR_STEP_S * entry.num_tokens)
        entry.refusal = not_resumable() if entry.matcher.is_error() else None
        return ended

    def masks(self, entries: Sequence[MatcherEntry], until_s: float) -> Sequence[IntArray]:
        """Make masks, those of the first entries only if the time is used up. until_s: CPU time of this
        thread at which no further one is begun.
        """
        self._on_progress()
        self._meter.touch(entry.copy for entry in entries if entry.copy is not None)
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
            if time.thread_time() >= until_s:
                self._times_each = True  # also those that are left
                break
        return made

    def cause_of_error(self, entry: MatcherEntry) -> Matcher:
        """Return the matcher that says why that of a sequence is in error, if it is."""
        assert entry.matcher is not None
        assert entry.copy is not None
        return cause_of(self._vocabulary, entry.copy.start, entry.matcher)

    def state(self, handle: bytes, entry: MatcherEntry, mask: IntArray) -> MatcherState:
        assert entry.matcher is not None
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

    def _behind_guesses(self, entry: MatcherEntry, mask: IntArray) -> Iterator[_Behind | None]:
        """Yield the state after each guess, up to the first guess that is not allowed; `mask` has the ids
        that may come first. None: finding it takes too long or fails.

        This time never ends a sequence, because the guesses may be wrong.
        """
        assert entry.matcher is not None
        assert entry.copy is not None
        matcher, began = entry.matcher.deep_copy(), time.thread_time()
        for guess in ids_of(entry.guesses) or ():
            if not _allows(mask, guess):
                return
            spent_s = time.thread_time() - began
            if spent_s > FAIR_STEP_S or entry.guess_excess_s > MAX_EXCESS_S:
                yield None
                return
            self._on_progress()
            entry.copy.has_followed_guesses = True
            is_right = matcher.consume_token(guess)
            mask, _ = self._vocabulary.timed_mask(matcher)
            entry.guess_excess_s += max(0.0, time.thread_time() - began - spent_s - FAIR_STEP_S)
            if not is_right or matcher.is_error():
                yield None
                return
            yield _Behind(mask, matcher.is_accepting())

    def _consume(self, entry: MatcherEntry, ids: list[int]) -> float:
        """Follow ids, as `follow`. A failure sets the error of the matcher."""
        assert entry.matcher is not None
        assert entry.copy is not None
        self._meter.touch((entry.copy,))
        self._on_progress()
        began = time.thread_time()
        entry.matcher.consume_tokens(ids)
        ended = time.thread_time()
        entry.excess_s += max(0.0, ended - began - FAIR_STEP_S * len(ids))
        return ended


def _kept(mask: IntArray, place: MaskPlace | None, number: int = 0) -> bytes | int:
    """Write a mask to the slot with this number, if there is one. Returns what MatcherState.masks has
    for it.
    """
    if place is not None and number < place.num_slots:
        memory, slot = place.memory, place.slot + number
        memory.write(slot, mask.view(np.uint8).data)
        return slot if np.frombuffer(memory.slot(slot), np.uint8).any() else b""
    return mask.tobytes() if mask.any() else b""


def _allows(mask: IntArray, token: int) -> bool:
    word, bit = divmod(token, WORD_BITS)
    return word < len(mask) and bool(mask.item(word) >> bit & 1)


def cause_of(vocabulary: BackendVocabulary[Any], start: Matcher, matcher: Matcher) -> Matcher:
    """Return the matcher that says why this one is in error: if its guide is used up, it may say that a token
    does not match.
    """
    if matcher.is_error() and not is_used_up(matcher):
        other = start.deep_copy()
        vocabulary.masks([other])
        return other if is_used_up(other) else matcher
    return matcher


def error_of(entry: MatcherEntry, cause: Matcher) -> InvalidRequest | None:
    """Return the error with which a sequence ends; None if it goes on. cause: result of `cause_of_error`."""
    assert entry.matcher is not None
    if not entry.matcher.is_error() and entry.excess_s <= MAX_EXCESS_S:
        return None
    refusal = None if is_used_up(cause) else entry.refusal
    return refusal or too_complex(reason_of(cause))


def too_complex(reason: str) -> InvalidRequest:
    """Return the error of a guide that cannot be followed any further."""
    reason = reason or "it takes too long to find what may come next"
    return InvalidRequest(f"the guide is too complex: {reason}", code="guide_too_complex")


def not_resumable() -> InvalidRequest:
    return InvalidRequest("resume: the output that there is does not match the guide", param="resume")


def ids_of(packed: bytes) -> list[int] | None:
    """Return the ids; None if the bytes are no ids, which a scheduler never sends."""
    if len(packed) % TOKEN_BYTES:
        return None
    ids: list[int] = unpack_ids(packed).tolist()
    return None if ids and min(ids) < 0 else ids
