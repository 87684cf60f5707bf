"""Matchers: the position of each guided sequence's output in its guide.

The state of a matcher follows from the guide and the ids alone, so it can be made again from these. Tenants
share the time for masks: the one that has had the least is next.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
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
"""CPU seconds that one token of a sequence may take without being counted. All other sequences wait
meanwhile.
"""
MAX_TENANTS = 256
"""Tenants whose shares of the time are remembered."""
MAX_EXCESS_S = 0.5
"""CPU seconds beyond FAIR_STEP_S that the tokens of a sequence may take together. Its guesses have as much,
counted separately.
"""


@dataclass(slots=True, eq=False)
class _Entry:
    matcher: Matcher
    num_tokens: int
    place: MaskPlace | None
    """Slots in which its masks are written; None: masks are sent."""
    tenant: str = ""
    excess_s: float = 0.0
    guesses: bytes = b""
    """Ids [n] int32, packed: the guesses that a step verifies after its tokens."""
    guess_excess_s: float = 0.0


class MaskPlace(NamedTuple):
    """Slots of one sequence, for the mask of its next token and those after its guesses."""

    memory: MaskMemory
    slot: int
    num_slots: int = 1


class _Behind(NamedTuple):
    """State after a guess."""

    mask: IntArray
    is_complete: bool


class _TimeShares:
    """Times that tenants have had for their masks, which are shared out as by a fair queue."""

    def __init__(self) -> None:
        self._had_s: dict[str, float] = {}
        """Seconds that each tenant has had, or that had been reached when it came."""
        self._each_s: dict[str, float] = {}
        """Seconds that each tenant's last masks took on average."""
        self._reached_s = 0.0

    def next_of(self, tenants: Collection[str]) -> str:
        """Return the one of these tenants that has had the least. Who was away has saved nothing up."""
        if len(self._had_s) > MAX_TENANTS:
            self._had_s, self._each_s = {}, {}
        had = {each: max(self._had_s.get(each, 0.0), self._reached_s) for each in tenants}
        tenant = min(had, key=lambda each: had[each])
        self._reached_s = self._had_s[tenant] = had[tenant]
        return tenant

    def num_at_once(self, tenant: str) -> int:
        """Return how many of a tenant's masks are made before it may be another tenant's turn."""
        return max(1, int(FAIR_STEP_S / max(self._each_s.get(tenant, FAIR_STEP_S), 1e-6)))

    def spend(self, tenant: str, seconds: float, num_masks: int) -> None:
        self._had_s[tenant] = self._had_s.get(tenant, 0.0) + seconds
        self._each_s[tenant] = seconds / num_masks


class GuideBroken(InvalidRequest):
    """Raised when a matcher cannot go on."""

    def __init__(self, handle: bytes, message: str) -> None:
        super().__init__(message, code="guide_too_complex")
        self.handle = handle


class Matchers:
    """The matchers of all guided sequences, by handle."""

    def __init__(
        self, vocabulary: BackendVocabulary[Any], on_progress: Callable[[], None] = lambda: None
    ) -> None:
        """`on_progress` is called before operations that may take long."""
        self._vocabulary = vocabulary
        self._on_progress = on_progress
        self._entries: dict[bytes, _Entry] = {}
        self._changed: dict[bytes, None] = {}
        """Handles of sequences whose state has to be sent."""
        self._shares = _TimeShares()
        self._num_of: Counter[str] = Counter()
        """Number of open matchers of each tenant."""
        self._times_each = False
        """True if the last masks took long: the next ones are timed one by one, to find the sequence that
        causes it.
        """

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
        tenant: str = "",
    ) -> None:
        """Open a matcher of a tenant at `start`, and follow the output so far. `place` is where masks are
        written; None: they are sent. Raises InvalidRequest.
        """
        ids = _ids(output_ids)
        if ids is None:
            self.close(handle)
            raise _not_resumable()
        entry = _Entry(start.deep_copy(), len(ids), place, tenant)
        if ids and not self._consume(entry, ids):
            self.close(handle)
            raise _not_resumable()
        self.close(handle)
        self._entries[handle] = entry
        self._num_of[tenant] += 1
        self._changed[handle] = None

    def advance(self, news: MatcherNews) -> None:
        """Follow new ids. News for an earlier matcher of the handle has no effect."""
        entry, ids = self._entries.get(news.handle), _ids(news.ids)
        if entry is None or ids is None or entry.num_tokens + len(ids) != news.num_tokens:
            return
        entry.num_tokens, entry.guesses = news.num_tokens, news.guesses
        if ids:
            self._consume(entry, ids)  # a failure sets the error of the matcher
        self._changed[news.handle] = None

    def start_of(self, handle: bytes) -> Matcher | None:
        """Return the matcher of a sequence, which must not be changed; None if it has none."""
        entry = self._entries.get(handle)
        return None if entry is None else entry.matcher

    def close(self, handle: bytes) -> None:
        entry = self._entries.pop(handle, None)
        self._changed.pop(handle, None)
        if entry is not None:
            self._num_of[entry.tenant] -= 1
            if not self._num_of[entry.tenant]:
                del self._num_of[entry.tenant]

    def clear(self) -> None:
        self._entries.clear()
        self._num_of.clear()
        self._changed.clear()

    def news(self, most: int) -> Iterator[MatcherState | GuideBroken]:
        """Yield the states of up to `most` sequences that have changed; those that cannot go on are closed.
        Sequences without guesses come first and by themselves, because the others take longer. If there are
        several tenants, those of one come, and no more than probably take FAIR_STEP_S.
        """
        plain = [handle for handle in self._changed if not self._entries[handle].guesses]
        handles = plain or list(self._changed)
        if len(self._num_of) < 2:
            yield from self._states(handles[:most])
            return
        tenant = self._shares.next_of({self._entries[handle].tenant for handle in handles})
        handles = [handle for handle in handles if self._entries[handle].tenant == tenant]
        handles = handles[: min(most, self._shares.num_at_once(tenant))]
        began = time.monotonic()
        yield from self._states(handles)
        self._shares.spend(tenant, time.monotonic() - began, len(handles))

    def _states(self, handles: Sequence[bytes]) -> Iterator[MatcherState | GuideBroken]:
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
        """Yield the state after each guess, up to the first guess that is not allowed; `mask` has the ids
        that may come first. None: finding it takes too long or fails.

        This time never ends a sequence, because the guesses may be wrong.
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


def _not_resumable() -> InvalidRequest:
    return InvalidRequest("resume: the output that there is does not match the guide", param="resume")


def _ids(packed: bytes) -> list[int] | None:
    """Return the ids; None if the bytes are no ids, which a scheduler never sends."""
    if len(packed) % TOKEN_BYTES:
        return None
    ids: list[int] = unpack_ids(packed).tolist()
    return None if ids and min(ids) < 0 else ids
