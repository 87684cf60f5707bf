"""Matchers: the position of each guided sequence's output in its guide.

The state of a matcher follows from the guide and the ids alone, so it can be made again from these: when a
process is replaced, and when a sequence moves to another copy of its guide. Tenants share the time for masks:
the one that has had the least is next.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np

from grammar_proc.backend import BackendVocabulary, Matcher
from grammar_proc.guides.guide_memory import GuideCopy, HeapMeter
from grammar_proc.vocabulary import WORD_BITS, is_used_up, reason_of
from runtime.base.errors import InvalidRequest
from runtime.base.mask_memory import MaskMemory
from runtime.ring.suspects.in_hand import SequencesInHand, at_work, place_of, request_of
from runtime.ring.suspects.roster import GUESSES, HYPOTHESES
from runtime.wire.format import NO_CONTENT, TOKEN_BYTES, IntArray, unpack_ids
from runtime.wire.guide import MatcherNews, MatcherState

FAIR_STEP_S = 0.025
"""CPU seconds that one token of a sequence may take without being counted. All other sequences wait
meanwhile.
"""
AT_ONCE_S = 0.01
"""Seconds that the work of a tenant may take at once, beyond one mask."""
CALMING = 0.8
"""Factor by which the estimate for a mask of a tenant falls at most from one turn to the next, so that a few
quick ones are no reason to make very many at once.
"""
MAX_TENANTS = 256
"""Tenants whose shares of the time are remembered."""
MAX_EXCESS_S = 0.5
"""CPU seconds beyond FAIR_STEP_S that the tokens of a sequence may take together. Its guesses have as much,
counted separately.
"""
LONG_OUTPUT = 64
"""Number of ids from which an output that has to be followed from its start is followed by itself."""


@dataclass(slots=True, eq=False)
class _Entry:
    copy: GuideCopy | None
    """The guide that it follows; None: it waits for another copy."""
    ids: bytearray
    """Output, packed."""
    place: MaskPlace | None
    """Slots in which its masks are written; None: masks are sent."""
    shown: bytes = b""
    """Its place in the roster while its output is in hand."""
    tenant: str = ""
    matcher: Matcher | None = None
    """None: the output has yet to be followed."""
    num_new: int = 0
    """Number of the last ids that the matcher has yet to follow."""
    is_due: bool = False
    """True if its state has to be sent as soon as it has a copy."""
    num_moves: int = 0
    refusal: InvalidRequest | None = None
    """Error of a guide that does not allow the output from which it began."""
    excess_s: float = 0.0
    guesses: bytes = b""
    """Ids [n] int32, packed: the guesses that a step verifies after its tokens."""
    guess_excess_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return len(self.ids) // TOKEN_BYTES

    @property
    def is_behind(self) -> bool:
        """Return True if the output has to be followed before the mask is made."""
        return self.matcher is None or self.num_new > 0

    @property
    def shown_now(self) -> bytes:
        """Its place in the roster while its state is made."""
        return at_work(self.shown, GUESSES) if self.guesses else self.shown

    @property
    def is_long_to_follow(self) -> bool:
        return self.matcher is None and self.num_tokens >= LONG_OUTPUT


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
        return max(1, int(AT_ONCE_S / max(self._each_s.get(tenant, AT_ONCE_S), 1e-6)))

    def spend(self, tenant: str, seconds: float, num_masks: int) -> None:
        self._had_s[tenant] = self._had_s.get(tenant, 0.0) + seconds
        self._each_s[tenant] = max(seconds / num_masks, CALMING * self._each_s.get(tenant, 0.0))


class GuideBroken(InvalidRequest):
    """Raised when a matcher cannot go on."""

    def __init__(self, handle: bytes, error: InvalidRequest) -> None:
        super().__init__(error.message, code=error.code, param=error.param)
        self.handle = handle


class GuideUsedUp(NamedTuple):
    """Copy of a guide that can be followed no more because of all that was followed in it. Its outputs go on
    in another copy.
    """

    copy: GuideCopy


class HypothesesDue(NamedTuple):
    """Search whose turn it is: its next hypothesis is to be followed."""

    handle: bytes


class Matchers:
    """The matchers of all guided sequences, by handle."""

    def __init__(
        self,
        vocabulary: BackendVocabulary[Any],
        on_progress: Callable[[], None] = lambda: None,
        meter: HeapMeter | None = None,
        in_hand: SequencesInHand | None = None,
    ) -> None:
        """`on_progress` is called before operations that may take long. `in_hand`: None if nobody is told
        what is worked on.
        """
        self._vocabulary = vocabulary
        self._on_progress = on_progress
        self._meter = meter or HeapMeter()
        self.in_hand = in_hand or SequencesInHand()
        self._entries: dict[bytes, _Entry] = {}
        self._changed: dict[bytes, None] = {}
        """Handles of sequences whose state has to be sent."""
        self._searching: dict[bytes, None] = {}
        """Handles of searches with hypotheses to follow."""
        self._shares = _TimeShares()
        self._num_of: Counter[str] = Counter()
        """Number of open matchers of each tenant."""
        self._until_s = math.inf
        """CPU time of this thread at which no further call of the library begins in this turn."""
        self._times_each = False
        """True if the last masks took long: the next ones are timed one by one, to find the sequence that
        causes it.
        """

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def has_news(self) -> bool:
        return bool(self._changed or self._searching)

    def open(
        self,
        handle: bytes,
        copy: GuideCopy,
        output_ids: bytes,
        place: MaskPlace | None = None,
        tenant: str = "",
        content: bytes = NO_CONTENT,
    ) -> None:
        """Open a matcher of a tenant, which will follow the output so far. `place` is where masks are
        written; None: they are sent. `content`: digest of the request. Raises InvalidRequest.
        """
        self.close(handle)
        if _ids(output_ids) is None:
            raise _not_resumable()
        self._entries[handle] = _Entry(
            None, bytearray(output_ids), place, place_of(handle, content, tenant), tenant, is_due=True
        )
        self._num_of[tenant] += 1
        self.resume(handle, copy)

    def advance(self, news: MatcherNews) -> None:
        """Take new ids, which are followed when it is the sequence's turn. News for an earlier matcher of the
        handle has no effect.
        """
        entry, ids = self._entries.get(news.handle), _ids(news.ids)
        if entry is None or ids is None or entry.num_tokens + len(ids) != news.num_tokens:
            return
        entry.ids += news.ids
        entry.guesses = news.guesses
        entry.num_new += len(ids)
        if entry.copy is None:
            entry.is_due = True
        else:
            self._changed[news.handle] = None

    def search(self, handle: bytes) -> None:
        """Give a search a turn, as `news` has them."""
        self._searching[handle] = None

    def copy_of(self, handle: bytes) -> GuideCopy | None:
        """Return the copy of its guide that a sequence follows."""
        entry = self._entries.get(handle)
        return None if entry is None else entry.copy

    def copies(self) -> dict[GuideCopy, None]:
        """Return the copies of guides that are followed, in the order in which their first sequences came."""
        return {entry.copy: None for entry in self._entries.values() if entry.copy is not None}

    def num_moves(self, handle: bytes) -> int:
        return self._entries[handle].num_moves

    def num_tokens(self, handle: bytes) -> int:
        """Return the number of tokens of a sequence's output."""
        return self._entries[handle].num_tokens

    def leave(self, handle: bytes, *, is_move: bool = True, is_due: bool = False) -> None:
        """Have a sequence follow its copy no longer, until `resume`. `is_move`: the copy is used up.
        `is_due`: its state has to be sent again in any case.
        """
        entry = self._entries[handle]
        self._leave(handle, entry)
        entry.num_moves += is_move
        entry.is_due |= is_due or handle in self._changed
        self._changed.pop(handle, None)
        self._searching.pop(handle, None)

    def resume(self, handle: bytes, copy: GuideCopy) -> None:
        """Have a sequence follow another copy of its guide, from the start of its output."""
        entry = self._entries[handle]
        entry.copy = copy
        copy.handles[handle] = None
        copy.num_served += 1
        if entry.is_due:
            entry.is_due = False
            self._changed[handle] = None

    def is_waiting(self, handle: bytes) -> bool:
        """Return True if a sequence has left its copy and follows no other one yet."""
        entry = self._entries.get(handle)
        return entry is not None and entry.copy is None

    @staticmethod
    def _leave(handle: bytes, entry: _Entry) -> None:
        if entry.copy is not None:
            entry.copy.handles.pop(handle, None)
        entry.copy = entry.matcher = None
        entry.num_new = 0

    def close(self, handle: bytes) -> None:
        entry = self._entries.pop(handle, None)
        self._changed.pop(handle, None)
        self._searching.pop(handle, None)
        if entry is not None:
            self._leave(handle, entry)
            self._num_of[entry.tenant] -= 1
            if not self._num_of[entry.tenant]:
                del self._num_of[entry.tenant]

    def clear(self) -> None:
        for handle in list(self._entries):
            self.close(handle)

    def news(
        self, most: int, until_s: float = math.inf
    ) -> Iterator[MatcherState | GuideBroken | GuideUsedUp | HypothesesDue]:
        """Yield the states of up to `most` sequences that have changed; those that cannot go on are closed.
        Sequences without guesses come first and by themselves, because the others take longer, and so do long
        outputs that have to be followed from their start. One of which grammar processes have died comes
        first and alone. All are of one tenant, and if there are several no more than probably take AT_ONCE_S.
        Behind them comes a search, whose time counts until the next value is asked for.

        `until_s`: CPU time of this thread at which what is left to do for them is left to the next call.
        """
        self._until_s = until_s
        alone = next(filter(self._must_be_alone, self._changed), None) if self.in_hand.has_alone else None
        if alone is not None:
            yield from self._states((alone,))
            return
        most = min(most, self._meter.num_masks_at_once)
        quick = [handle for handle in self._changed if not self._entries[handle].is_long_to_follow]
        plain = [handle for handle in quick if not self._entries[handle].guesses]
        handles = plain or quick
        if not handles:
            handles, most = list(self._changed), 1
        tenants = {self._entries[handle].tenant for each in (handles, self._searching) for handle in each}
        if not tenants:
            return
        tenant = self._shares.next_of(tenants)
        handles = [handle for handle in handles if self._entries[handle].tenant == tenant]
        if len(self._num_of) > 1:
            most = min(most, self._shares.num_at_once(tenant))
        handles = handles[:most]
        began = time.monotonic()
        yield from self._states(handles)
        search = next((each for each in self._searching if self._entries[each].tenant == tenant), None)
        if search is not None:
            del self._searching[search]
            yield HypothesesDue(search)
        num_masks = len(handles) + (search is not None)
        self._shares.spend(tenant, time.monotonic() - began, num_masks)

    def _must_be_alone(self, handle: bytes) -> bool:
        return self.in_hand.must_be_alone(request_of(self._entries[handle].shown))

    def take_in_hand(self, handle: bytes) -> None:
        """Show that the hypotheses of a sequence are worked on, until `put_down`. An error that ends the
        process leaves it.
        """
        self.in_hand.show_only((at_work(self._entries[handle].shown, HYPOTHESES),))

    def put_down(self) -> None:
        self.in_hand.put_all_down()

    def _states(self, handles: Sequence[bytes]) -> Iterator[MatcherState | GuideBroken | GuideUsedUp]:
        if not handles:
            return
        handles = self._followed(handles)
        if not handles:
            return
        self.in_hand.show_only([self._entries[handle].shown_now for handle in handles])
        states = list(self._states_in_hand(handles))
        self.in_hand.put_all_down()
        yield from states

    def _followed(self, handles: Sequence[bytes]) -> Sequence[bytes]:
        """Return the first of these sequences whose outputs have been followed. If there is none, follow
        some, and return these; none if this has used up the time: their masks are left to the next call.
        """
        followed = list(takewhile(lambda handle: not self._entries[handle].is_behind, handles))
        if followed:
            return followed
        self._meter.read()  # what has come before is not theirs
        for handle in handles:
            entry = self._entries[handle]
            if not entry.is_behind:
                continue
            self.in_hand.show_only((entry.shown,))
            if self._follow(entry) >= self._until_s:
                self.in_hand.show_only(())  # nothing is done yet
                self._meter.read()
                return ()
        return handles

    def _states_in_hand(self, handles: Sequence[bytes]) -> Iterator[MatcherState | GuideBroken | GuideUsedUp]:
        masks = self._masks([self._entries[handle] for handle in handles])
        handles = handles[: len(masks)]
        entries = [self._entries[handle] for handle in handles]
        for handle, entry, mask in zip(handles, entries, masks, strict=True):
            del self._changed[handle]
            assert entry.matcher is not None
            assert entry.copy is not None
            entry.copy.num_masks += 1
            cause = cause_of(self._vocabulary, entry.copy.start, entry.matcher)
            if is_used_up(cause) and not entry.copy.is_for_one:
                if entry.copy.num_served == 1:
                    entry.guess_excess_s = math.inf  # it was the guesses
                entry.is_due = True
                yield GuideUsedUp(entry.copy)
                continue
            if entry.matcher.is_error() or entry.excess_s > MAX_EXCESS_S:
                refusal = None if is_used_up(cause) else entry.refusal
                error = refusal or too_complex(reason_of(cause))
                self.close(handle)
                yield GuideBroken(handle, error)
                continue
            yield self._state(handle, entry, mask)
        self._meter.touch(entry.copy for entry in entries if entry.copy is not None)
        self._meter.read()

    def _follow(self, entry: _Entry) -> float:
        """Follow the new ids of a sequence, all of its output if it has no matcher. Returns the CPU time of
        this thread afterwards.
        """
        num_new, entry.num_new = entry.num_new, 0
        if entry.matcher is not None:
            return self._consume(entry, _ids(bytes(entry.ids[-num_new * TOKEN_BYTES :])) or [])
        assert entry.copy is not None
        self._meter.touch((entry.copy,))
        self._on_progress()
        began = time.thread_time()
        entry.matcher = self._vocabulary.follow(entry.copy.start, _ids(bytes(entry.ids)) or [])
        ended = time.thread_time()
        entry.excess_s += max(0.0, ended - began - FAIR_STEP_S * entry.num_tokens)
        entry.refusal = _not_resumable() if entry.matcher.is_error() else None
        return ended

    def _state(self, handle: bytes, entry: _Entry, mask: IntArray) -> MatcherState:
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

    def _behind_guesses(self, entry: _Entry, mask: IntArray) -> Iterator[_Behind | None]:
        """Yield the state after each guess, up to the first guess that is not allowed; `mask` has the ids
        that may come first. None: finding it takes too long or fails.

        This time never ends a sequence, because the guesses may be wrong.
        """
        assert entry.matcher is not None
        assert entry.copy is not None
        matcher, began = entry.matcher.deep_copy(), time.thread_time()
        for guess in _ids(entry.guesses) or ():
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

    def _consume(self, entry: _Entry, ids: list[int]) -> float:
        """Follow ids, as `_follow`. A failure sets the error of the matcher."""
        assert entry.matcher is not None
        assert entry.copy is not None
        self._meter.touch((entry.copy,))
        self._on_progress()
        began = time.thread_time()
        entry.matcher.consume_tokens(ids)
        ended = time.thread_time()
        entry.excess_s += max(0.0, ended - began - FAIR_STEP_S * len(ids))
        return ended

    def _masks(self, entries: Sequence[_Entry]) -> Sequence[IntArray]:
        """Make masks, those of the first entries only if the time is used up."""
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
            if time.thread_time() >= self._until_s:
                self._times_each = True  # also those that are left
                break
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


def cause_of(vocabulary: BackendVocabulary[Any], start: Matcher, matcher: Matcher) -> Matcher:
    """Return the matcher that says why this one is in error: if its guide is used up, it may say that a token
    does not match.
    """
    if matcher.is_error() and not is_used_up(matcher):
        other = start.deep_copy()
        vocabulary.masks([other])
        return other if is_used_up(other) else matcher
    return matcher


def too_complex(reason: str) -> InvalidRequest:
    """Return the error of a guide that cannot be followed any further."""
    reason = reason or "it takes too long to find what may come next"
    return InvalidRequest(f"the guide is too complex: {reason}", code="guide_too_complex")


def _not_resumable() -> InvalidRequest:
    return InvalidRequest("resume: the output that there is does not match the guide", param="resume")


def _ids(packed: bytes) -> list[int] | None:
    """Return the ids; None if the bytes are no ids, which a scheduler never sends."""
    if len(packed) % TOKEN_BYTES:
        return None
    ids: list[int] = unpack_ids(packed).tolist()
    return None if ids and min(ids) < 0 else ids
