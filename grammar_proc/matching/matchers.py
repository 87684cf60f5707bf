"""Matchers: the position of each guided sequence's output in its guide.

The state of a matcher follows from the guide and the ids alone, so it can be made again from these: when a
process is replaced, and when a sequence moves to another copy of its guide. Tenants share the time for masks:
the one that has had the least is next.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import Any, NamedTuple, TypeAlias

from grammar_proc.backend import BackendVocabulary
from grammar_proc.guides.guide_memory import GuideCopy, HeapMeter
from grammar_proc.matching.matcher_entry import MaskPlace, MatcherEntry
from grammar_proc.matching.state_maker import StateMaker, error_of, ids_of, not_resumable
from grammar_proc.matching.time_shares import TimeShares
from grammar_proc.vocabulary import is_used_up
from runtime.base.errors import InvalidRequest
from runtime.ring.suspects.in_hand import SequencesInHand, at_work, place_of, request_of
from runtime.ring.suspects.roster import HYPOTHESES
from runtime.wire.format import NO_CONTENT
from runtime.wire.guide import MatcherNews, MatcherState

AT_ONCE_S = 0.01
"""Seconds that the work of a tenant may take at once, beyond one mask."""


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


MatcherOutcome: TypeAlias = MatcherState | GuideBroken | GuideUsedUp
"""State of a sequence that has changed, or the reason why there is none."""


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
        self._meter = meter or HeapMeter()
        self._maker = StateMaker(vocabulary, self._meter, on_progress)
        self.in_hand = in_hand or SequencesInHand()
        self._entries: dict[bytes, MatcherEntry] = {}
        self._changed: dict[bytes, None] = {}
        """Handles of sequences whose state has to be sent."""
        self._searching: dict[bytes, None] = {}
        """Handles of searches with hypotheses to follow."""
        self._shares = TimeShares(AT_ONCE_S)
        self._num_of: Counter[str] = Counter()
        """Number of open matchers of each tenant."""

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
        if ids_of(output_ids) is None:
            raise not_resumable()
        self._entries[handle] = MatcherEntry(
            None, bytearray(output_ids), place, place_of(handle, content, tenant), tenant, is_due=True
        )
        self._num_of[tenant] += 1
        self.resume(handle, copy)

    def advance(self, news: MatcherNews) -> None:
        """Take new ids, which are followed when it is the sequence's turn. News for an earlier matcher of the
        handle has no effect.
        """
        entry, ids = self._entries.get(news.handle), ids_of(news.ids)
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
        """Detach a sequence from its copy of the guide, until `resume`. `is_move`: the copy is used up.
        `is_due`: its state has to be sent again in any case.
        """
        entry = self._entries[handle]
        self._leave(handle, entry)
        entry.num_moves += is_move
        entry.is_due |= is_due or handle in self._changed
        self._changed.pop(handle, None)
        self._searching.pop(handle, None)

    def resume(self, handle: bytes, copy: GuideCopy) -> None:
        """Attach a sequence to a copy of its guide, in which its output is followed from the start."""
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
    def _leave(handle: bytes, entry: MatcherEntry) -> None:
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

    def news(self, most: int, until_s: float = math.inf) -> Iterator[MatcherOutcome | HypothesesDue]:
        """Yield the states of up to `most` sequences that have changed; those that cannot go on are closed.
        Sequences without guesses come first and by themselves, because the others take longer, and so do long
        outputs that have to be followed from their start. One of which grammar processes have died comes
        first and alone. All are of one tenant, and if there are several no more than probably take AT_ONCE_S.
        Behind them comes a search, whose time counts until the next value is asked for.

        `until_s`: CPU time of this thread at which what is left to do for them is left to the next call.
        """
        alone = next(filter(self._must_be_alone, self._changed), None) if self.in_hand.has_alone else None
        if alone is not None:
            yield from self._states((alone,), until_s)
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
        yield from self._states(handles, until_s)
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

    def _states(self, handles: Sequence[bytes], until_s: float) -> Iterator[MatcherOutcome]:
        if not handles:
            return
        handles = self._followed(handles, until_s)
        if not handles:
            return
        self.in_hand.show_only([self._entries[handle].shown_now for handle in handles])
        states = list(self._states_in_hand(handles, until_s))
        self.in_hand.put_all_down()
        yield from states

    def _followed(self, handles: Sequence[bytes], until_s: float) -> Sequence[bytes]:
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
            if self._maker.follow(entry) >= until_s:
                self.in_hand.show_only(())  # nothing is done yet
                self._meter.read()
                return ()
        return handles

    def _states_in_hand(self, handles: Sequence[bytes], until_s: float) -> Iterator[MatcherOutcome]:
        masks = self._maker.masks([self._entries[handle] for handle in handles], until_s)
        handles = handles[: len(masks)]
        entries = [self._entries[handle] for handle in handles]
        for handle, entry, mask in zip(handles, entries, masks, strict=True):
            del self._changed[handle]
            assert entry.matcher is not None
            assert entry.copy is not None
            entry.copy.num_masks += 1
            cause = self._maker.cause_of_error(entry)
            if is_used_up(cause) and not entry.copy.is_for_one:
                if entry.copy.num_served == 1:
                    entry.guess_excess_s = math.inf  # it was the guesses
                entry.is_due = True
                yield GuideUsedUp(entry.copy)
                continue
            error = error_of(entry, cause)
            if error is not None:
                self.close(handle)
                yield GuideBroken(handle, error)
                continue
            yield self._maker.state(handle, entry, mask)
        self._meter.touch(entry.copy for entry in entries if entry.copy is not None)
        self._meter.read()
