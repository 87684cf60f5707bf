"""GrammarClient: the scheduler's connection to the grammar process. It keeps the guided sequences, sends
their news to that process, and takes its answers.

It can send everything again: when a new grammar process announces itself, every matcher is opened again with
the ids that its sequence has.
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
from scheduler_proc.features.mask_patience import MaskPatience
from scheduler_proc.features.mask_slots import NO_SLOT, MaskSlots

News: TypeAlias = Callable[[float], list[FromGrammar]]
"""Function like Port.grammar_news."""


class GuidedSequence(Protocol):
    """A sequence with a guide, as the client sees it."""

    handle: bytes
    tenant: str
    content: bytes
    """Digest of what the request asks for."""
    guide: Guide
    state: MatcherState | None
    """Latest answer about the sequence; None before the first one."""

    @property
    def output_ids(self) -> bytes: ...

    @property
    def is_current(self) -> bool:
        """True if the answer covers everything that was sent about the sequence."""

    def begin_again(self) -> None:
        """Forget the answer and the guesses that were sent. The new grammar process has only been sent the
        output.
        """


class GuidedSearch(GuidedSequence, Protocol):
    """A beam search with a guide, as the client sees it. Its `state` is the one of an empty output."""

    def all_branches(self) -> BranchMatchers | None:
        """Return all hypotheses, each from its start; None while the output is empty."""

    def take(self, states: BranchStates) -> None:
        """Take an answer about the hypotheses."""


class GrammarClient:
    def __init__(
        self,
        send: Callable[[Message], bool],
        news: News,
        clock: Callable[[], float],
        slots: MaskSlots | None = None,
    ) -> None:
        """send: as Outbox.send. slots: shared memory slots for masks; None: masks come in messages."""
        self.slots = slots
        self._outbox = KeepingOutbox[Message](send)
        self._news = news
        self._clock = clock
        self._sequences: dict[bytes, GuidedSequence] = {}
        self._searches: dict[bytes, GuidedSearch] = {}
        """The guided sequences that are beam searches."""
        self._slot_of: dict[bytes, int] = {}
        self._news_to_send: list[MatcherNews] = []
        self.patience = MaskPatience()
        self._looked_s = -1.0
        self._outbox.send(ForgetMatchers())

    def open(self, sequence: GuidedSequence) -> None:
        self._sequences[sequence.handle] = sequence
        self._open(sequence)

    def open_search(self, search: GuidedSearch) -> None:
        self._searches[search.handle] = search
        self.open(search)

    def branch(self, message: BranchMatchers) -> None:
        """Send the hypotheses of a search, whose masks are then made while the model computes."""
        self._outbox.send(message)

    def _open(self, sequence: GuidedSequence) -> None:
        handle, tenant, content = sequence.handle, sequence.tenant, sequence.content
        slot = NO_SLOT if self.slots is None else self.slots.take()
        if self.slots is None or slot == NO_SLOT:
            opened = OpenMatcher(handle, sequence.guide, sequence.output_ids, tenant=tenant, content=content)
            self._outbox.send(opened)
            return
        self._slot_of[handle] = slot
        memory, width = self.slots.memory.name, self.slots.width
        ids = sequence.output_ids
        opened = OpenMatcher(handle, sequence.guide, ids, memory, slot, width, tenant, content)
        self._outbox.send(opened)

    def bits_of(self, mask: bytes | int) -> bytes | memoryview:
        """Return the mask of an answer, from its message or its slot."""
        if isinstance(mask, bytes):
            return mask
        assert self.slots is not None
        return self.slots.memory.slot(mask)

    def put(self, place: bytes | int, mask: bytes) -> bytes | int:
        """Store a changed mask in the place of an answer's mask. Returns the mask itself, or its slot."""
        if isinstance(place, bytes):
            return mask
        assert self.slots is not None
        self.slots.memory.write(place, mask)
        return place

    def advance(self, news: MatcherNews) -> None:
        """Record new ids or guesses of a sequence, to be sent together with those of the step's other
        sequences.
        """
        self._news_to_send.append(news)

    def close(self, handle: bytes) -> None:
        del self._sequences[handle]
        self._searches.pop(handle, None)
        # The slot's next owner is opened after this message, so no slot is written for two sequences.
        self._outbox.send(CloseMatcher(handle))
        self._let_go(handle)

    def look(self) -> None:
        """Take the answers that have arrived. Called once a turn for all waiting sequences; time does not
        advance within a turn.
        """
        if self._clock() != self._looked_s:
            self._looked_s = self._clock()
            self.take_news()

    def take_news(self, wait_s: float = 0.0) -> None:
        self.send_news()
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
                if sequence is None:  # nobody here has opened it, or its end has not come there yet
                    self._outbox.send(CloseMatcher(state.handle))
                elif self._may_read(state):
                    sequence.state = state
                    self._follow_up(state.handle)

    def _follow_up(self, handle: bytes) -> None:
        """Send the hypotheses of a search whose guide a new grammar process has opened."""
        search = self._searches.get(handle)
        branches = None if search is None else search.all_branches()
        if branches is not None:
            self._outbox.send(branches)

    def _may_read(self, state: MatcherState) -> bool:
        """Return False if the answer's masks are in slots that the sequence had before it was
        opened again.
        """
        first = state.masks[0]
        return isinstance(first, bytes) or first == self._slot_of.get(state.handle)

    def wait_for(self, sequence: GuidedSequence) -> bool:
        """Wait until the answer about a sequence or search is current, for as long as `patience` has been
        told. Returns False if it is late.
        """
        self.send_news()
        while not sequence.is_current:
            left_s = self.patience.left_s(self._clock())
            self.take_news(max(left_s, 0.0))
            if left_s <= 0.0:
                return sequence.is_current
        return True

    @property
    def has_sent_news(self) -> bool:
        return not self._news_to_send and not len(self._outbox)

    def send_news(self) -> None:
        """Send the new ids and guesses of all sequences."""
        if self._news_to_send:
            self._outbox.send(AdvanceMatchers(tuple(self._news_to_send)))
            self._news_to_send.clear()
        else:
            self._outbox.flush()

    def _let_go(self, handle: bytes) -> None:
        slot = self._slot_of.pop(handle, NO_SLOT)
        if self.slots is not None:
            self.slots.let_go(slot)

    def _open_again(self) -> None:
        """Open all matchers again in a new grammar process. Steps may still read the old slots, so each
        sequence gets new ones.
        """
        self._news_to_send.clear()
        for handle in list(self._slot_of):
            self._let_go(handle)
        for sequence in self._sequences.values():
            sequence.begin_again()
            self._open(sequence)
