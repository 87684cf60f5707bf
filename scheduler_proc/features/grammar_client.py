"""GrammarClient: the scheduler's end of the grammar process. Which sequences are guided, what that process is
told of them, and what it has answered.

It owns nothing that it could not send again: when a new grammar process says that it is there, every matcher
is opened with the ids that its sequence has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from runtime.wire.format import Message
from runtime.wire.guide import Guide, MatcherNews, MatcherState
from runtime.wire.hypotheses import BranchMatchers, BranchStates
from runtime.wire.messages import (
    AdvanceMatchers,
    CloseMatcher,
    ForgetMatchers,
    FromGrammar,
    GrammarStarted,
    OpenMatcher,
)
from runtime.wire.outbox import KeepingOutbox
from scheduler_proc.features.mask_slots import NO_SLOT, MaskSlots

MAX_WAIT_S = 0.04
"""Most seconds that a step waits for its masks, from when they were asked for. All its rows wait with those
that need one.
"""
News: TypeAlias = Callable[[float], list[FromGrammar]]
"""Function like Port.grammar_news."""


class GuidedSequence(Protocol):
    """Questions that are asked of a sequence with a guide."""

    handle: bytes
    guide: Guide
    state: MatcherState | None
    """Newest answer about the sequence."""

    @property
    def output_ids(self) -> bytes: ...

    @property
    def is_current(self) -> bool:
        """Tell whether the answer is of all that was told of the sequence."""

    def begin_again(self) -> None:
        """Forget the answer, and the guesses that were told: who is to answer now has been told the output
        alone.
        """


class GuidedSearch(GuidedSequence, Protocol):
    """Questions that are asked of a beam search with a guide. `state` is that of an output without tokens."""

    def all_branches(self) -> BranchMatchers | None:
        """Return all its hypotheses, each from the start; None when they have no tokens."""

    def take(self, states: BranchStates) -> None:
        """Take an answer about its hypotheses."""


class GrammarClient:
    def __init__(
        self,
        send: Callable[[Message], bool],
        news: News,
        clock: Callable[[], float],
        slots: MaskSlots | None = None,
    ) -> None:
        """`send`: as Outbox.send; `slots`: where masks lie; None: they come in messages."""
        self.slots = slots
        self._outbox = KeepingOutbox[Message](send)
        self._news = news
        self._clock = clock
        self._sequences: dict[bytes, GuidedSequence] = {}
        self._searches: dict[bytes, GuidedSearch] = {}
        """Those among the sequences that are searches."""
        self._slot_of: dict[bytes, int] = {}
        self._news_to_send: list[MatcherNews] = []
        self._wait_until = 0.0
        self._looked_s = -1.0
        self._outbox.send(ForgetMatchers())

    def open(self, sequence: GuidedSequence) -> None:
        self._sequences[sequence.handle] = sequence
        self._open(sequence)

    def open_search(self, search: GuidedSearch) -> None:
        self._searches[search.handle] = search
        self.open(search)

    def branch(self, message: BranchMatchers) -> None:
        """Tell the hypotheses of a search, whose masks are then made while the model computes."""
        self._outbox.send(message)
        self._wait_until = self._clock() + MAX_WAIT_S

    def _open(self, sequence: GuidedSequence) -> None:
        handle = sequence.handle
        slot = NO_SLOT if self.slots is None else self.slots.take()
        if self.slots is None or slot == NO_SLOT:
            self._outbox.send(OpenMatcher(handle, sequence.guide, sequence.output_ids))
            return
        self._slot_of[handle] = slot
        memory, width = self.slots.memory.name, self.slots.width
        self._outbox.send(OpenMatcher(handle, sequence.guide, sequence.output_ids, memory, slot, width))

    def bits_of(self, mask: bytes | int) -> bytes | memoryview:
        """Return a mask of an answer, wherever it lies."""
        if isinstance(mask, bytes):
            return mask
        assert self.slots is not None
        return self.slots.memory.slot(mask)

    def put(self, place: bytes | int, mask: bytes) -> bytes | int:
        """Have another mask lie where one of an answer does. Returns it, or its slot."""
        if isinstance(place, bytes):
            return mask
        assert self.slots is not None
        self.slots.memory.write(place, mask)
        return place

    def advance(self, news: MatcherNews) -> None:
        """Note new ids, or guesses, of a sequence; sent with those of others of the step."""
        self._news_to_send.append(news)

    def close(self, handle: bytes) -> None:
        del self._sequences[handle]
        self._searches.pop(handle, None)
        # Whoever gets the slot next is opened after this: it is not written for two.
        self._outbox.send(CloseMatcher(handle))
        self._let_go(handle)

    def look(self) -> None:
        """Take what has come, once a turn for all that wait: time stands still in it."""
        if self._clock() != self._looked_s:
            self._looked_s = self._clock()
            self.take_news()

    def take_news(self, wait_s: float = 0.0) -> None:
        self._send_ids()
        for message in self._news(wait_s):
            if isinstance(message, GrammarStarted):
                self._open_again()
                continue
            if isinstance(message, BranchStates):
                if (search := self._searches.get(message.handle)) is not None:
                    search.take(message)
                continue
            for state in message.states:
                sequence = self._sequences.get(state.handle)
                if sequence is not None and self._may_read(state):
                    sequence.state = state
                    self._follow_up(state.handle)

    def _follow_up(self, handle: bytes) -> None:
        """Tell the hypotheses of a search whose guide a new grammar process has opened."""
        search = self._searches.get(handle)
        branches = None if search is None else search.all_branches()
        if branches is not None:
            self._outbox.send(branches)

    def _may_read(self, state: MatcherState) -> bool:
        """False: its masks lie in slots that the sequence had before it was opened again."""
        first = state.masks[0]
        return isinstance(first, bytes) or first == self._slot_of.get(state.handle)

    def wait_for(self, sequence: GuidedSequence) -> bool:
        """Wait until the answer is current. False: it is late."""
        self._send_ids()
        while not sequence.is_current:
            left_s = self._wait_until - self._clock()
            self.take_news(max(left_s, 0.0))
            if left_s <= 0.0:
                return sequence.is_current
        return True

    def _send_ids(self) -> None:
        if self._news_to_send:
            self._outbox.send(AdvanceMatchers(tuple(self._news_to_send)))
            self._news_to_send.clear()
            self._wait_until = self._clock() + MAX_WAIT_S
        else:
            self._outbox.flush()

    def _let_go(self, handle: bytes) -> None:
        slot = self._slot_of.pop(handle, NO_SLOT)
        if self.slots is not None:
            self.slots.let_go(slot)

    def _open_again(self) -> None:
        """Whoever wrote the slots is gone. Steps may still read them, so each sequence gets others."""
        self._news_to_send.clear()
        for handle in list(self._slot_of):
            self._let_go(handle)
        for sequence in self._sequences.values():
            sequence.begin_again()
            self._open(sequence)
