"""The grammar process's work loop: receives guides and token ids, and sends masks.

Which guides there are, and which sequences follow them: FollowedGuides.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from grammar_proc.backend import BackendVocabulary
from grammar_proc.branches import BranchBroken, Branches
from grammar_proc.compiler import GuideCompiler
from grammar_proc.guides.followed_guides import FollowedGuides
from grammar_proc.guides.guide_memory import GuideCopy, HeapMeter
from grammar_proc.matching.matcher_entry import MaskPlace
from grammar_proc.matching.matchers import AT_ONCE_S, GuideBroken, GuideUsedUp, HypothesesDue, Matchers
from runtime.base.mask_memory import MaskMemory
from runtime.ring.suspects.in_hand import SequencesInHand
from runtime.wire.format import Message
from runtime.wire.guide import MatcherState
from runtime.wire.hypotheses import BranchMatchers
from runtime.wire.messages import (
    AdvanceMatchers,
    CloseMatcher,
    ErrorInfo,
    ForgetMatchers,
    GrammarStarted,
    GuideRefused,
    MatcherStates,
    OpenMatcher,
    ToGrammar,
)
from runtime.wire.outbox import KeepingOutbox
from runtime.wire.transport import Inbox, Outbox

MAX_DRAIN = 256
MAX_DRAIN_BYTES = 1 << 20
"""Bytes of messages after which no further one is read in a turn. A guide of the maximum length takes a
millisecond to read and to hash.
"""
MAX_STATES = 64
"""Maximum number of states in one message, so that the first ones need not wait for the last."""
BUSY_WAIT_S = 0.02


class GrammarLoop:
    """Work loop of the grammar process. `turn` is called whenever something can be read."""

    def __init__(
        self,
        inbox: Inbox,
        scheduler: Outbox,
        masks_out: Outbox,
        vocabulary: BackendVocabulary[Any],
        compiler: GuideCompiler,
        on_progress: Callable[[], None] = lambda: None,
        in_hand: SequencesInHand | None = None,
    ) -> None:
        """`scheduler` receives refusals, and `masks_out` the masks. `on_progress` is called in a turn that
        may take long. `in_hand`: None if nobody is told what this process works on.
        """
        self._inbox = inbox
        self._scheduler = KeepingOutbox[Message](scheduler.send)
        self._masks_out = KeepingOutbox[Message](masks_out.send)
        self._meter = HeapMeter()
        self._matchers = Matchers(vocabulary, on_progress, self._meter, in_hand)
        self._branches = Branches(vocabulary, on_progress)
        self._guides = FollowedGuides(
            vocabulary, compiler, self._matchers, self._branches, self._meter, self._place_of, self._refuse
        )
        self._memory: MaskMemory | None = None
        """Memory of the scheduler in which masks are written."""
        self._has_room = True
        self._masks_out.send(GrammarStarted())

    @property
    def files(self) -> list[int]:
        """Return the file descriptors, besides the inbox, that become readable when there is something
        to do.
        """
        return self._guides.files

    @property
    def reads(self) -> bool:
        """Return False while the scheduler has no room for answers: a message that arrives waits then."""
        return self._has_room

    @property
    def num_matchers(self) -> int:
        return len(self._matchers)

    @property
    def num_sequences(self) -> int:
        """Number of sequences that have a matcher or wait for their guide."""
        return len(self._guides)

    def turn(self) -> float:
        """Do all pending work. Returns the seconds after which to call it again if nothing arrives."""
        for message in self._inbox.drain(MAX_DRAIN, MAX_DRAIN_BYTES) if self._flush() else ():
            self._receive(message)
        self._guides.poll()
        began, until_s = time.monotonic(), time.thread_time() + AT_ONCE_S
        # What has arrived meanwhile may be from a tenant whose turn it is.
        while self._matchers.has_news and time.monotonic() - began < AT_ONCE_S:
            self._tell(MAX_STATES, until_s)
        self._guides.make_room()
        self._flush()
        if self._matchers.has_news:
            return 0.0
        return BUSY_WAIT_S if self._guides.is_busy or not self._has_room else 1.0

    def _flush(self) -> bool:
        """Send the answers that wait for room. Returns False if some have none."""
        are_sent = self._scheduler.flush(), self._masks_out.flush()
        self._has_room = all(are_sent)
        return self._has_room

    def _receive(self, message: ToGrammar) -> None:
        if isinstance(message, AdvanceMatchers):
            for news in message.entries:
                self._matchers.advance(news)
        elif isinstance(message, OpenMatcher):
            self._guides.open(message)
        elif isinstance(message, CloseMatcher):
            self._guides.close(message.handle)
        elif isinstance(message, BranchMatchers):
            if self._matchers.copy_of(message.handle) is not None:
                self._branches.add(message)
                self._matchers.search(message.handle)
        elif isinstance(message, ForgetMatchers):
            self._matchers.clear()
            self._branches.clear()
            self._memory = None
            self._guides.close_all()

    def _place_of(self, message: OpenMatcher) -> MaskPlace | None:
        """Return the place where masks are written. None: they are sent, or the scheduler that asked
        is gone.
        """
        if not message.memory:
            return None
        try:
            if self._memory is None or self._memory.name != message.memory:
                self._memory = MaskMemory.open(message.memory)
            self._memory.slot(message.slot + max(0, message.num_slots - 1))
        except (OSError, ValueError, IndexError):
            return None
        return MaskPlace(self._memory, message.slot, message.num_slots)

    def _refuse(self, handle: bytes, error: ErrorInfo) -> None:
        self._scheduler.send(GuideRefused(handle, error))

    # -- masks ----------------------------------------------------------------------------------------------

    def _branch(self, handle: bytes) -> GuideCopy | None:
        """Follow a hypothesis of a search, and make its mask. Returns its copy of the guide if that is used
        up.
        """
        copy = self._matchers.copy_of(handle)
        if copy is None or not self._branches.has_work(handle):
            return None
        self._meter.touch((copy,))
        try:
            self._matchers.take_in_hand(handle)
            states = self._branches.step(copy.start, handle)
            self._matchers.put_down()
        except BranchBroken as error:
            self._matchers.put_down()
            if error.is_used_up and not copy.is_for_one:
                return copy
            self._guides.give_up(handle, error)
            return None
        if states is not None:
            self._masks_out.send(states)
        if self._branches.has_work(handle):
            self._matchers.search(handle)
        return None

    def _tell(self, most: int, until_s: float) -> None:
        states: list[MatcherState] = []
        used_up: dict[GuideCopy, None] = {}
        for each in self._matchers.news(most, until_s):
            if isinstance(each, GuideBroken):
                self._guides.give_up(each.handle, each)
            elif isinstance(each, GuideUsedUp):
                used_up[each.copy] = None
            elif isinstance(each, HypothesesDue):
                if (copy := self._branch(each.handle)) is not None:
                    used_up[copy] = None
            else:
                states.append(each)
        if states:
            self._masks_out.send(MatcherStates(tuple(states)))
        for copy in used_up:
            self._guides.move(copy)

    def close(self) -> None:
        self._guides.end()
