"""GrammarClient: the scheduler's end of the grammar process. Which sequences are guided, what that process is
told of them, and what it has answered.

It owns nothing that it could not send again: when a new grammar process says that it is there, every matcher
is opened with the ids that its sequence has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from runtime.wire.format import Message, pack_ids
from runtime.wire.guide import Guide
from runtime.wire.messages import (
    AdvanceMatchers,
    CloseMatcher,
    ForgetMatchers,
    FromGrammar,
    GrammarStarted,
    MatcherState,
    OpenMatcher,
)
from runtime.wire.outbox import KeepingOutbox

MAX_WAIT_S = 0.04
"""For the masks of a step, from when they were asked for. All its rows wait with those that need one."""
News: TypeAlias = Callable[[float], list[FromGrammar]]
"""Same as Port.grammar_news."""


class GuidedSequence(Protocol):
    """Questions that are asked of a sequence with a guide."""

    handle: bytes
    guide: Guide
    state: MatcherState | None
    """Newest answer to it."""

    @property
    def output_ids(self) -> bytes: ...

    @property
    def is_current(self) -> bool:
        """The answer is of all of its output."""


class GrammarClient:
    def __init__(self, send: Callable[[Message], bool], news: News, clock: Callable[[], float]) -> None:
        """`send`: as Outbox.send."""
        self._outbox = KeepingOutbox[Message](send)
        self._news = news
        self._clock = clock
        self._sequences: dict[bytes, GuidedSequence] = {}
        self._new_ids: list[tuple[bytes, int, bytes]] = []
        self._wait_until = 0.0
        self._looked_s = -1.0
        self._outbox.send(ForgetMatchers())

    def open(self, sequence: GuidedSequence) -> None:
        self._sequences[sequence.handle] = sequence
        self._outbox.send(OpenMatcher(sequence.handle, sequence.guide, sequence.output_ids))

    def advance(self, handle: bytes, num_tokens: int, ids: list[int]) -> None:
        """Note new ids, after which there are so many; sent with those of other sequences of the step."""
        self._new_ids.append((handle, num_tokens, pack_ids(ids)))

    def close(self, handle: bytes) -> None:
        del self._sequences[handle]
        self._outbox.send(CloseMatcher(handle))

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
            for state in message.states:
                sequence = self._sequences.get(state.handle)
                if sequence is not None:
                    sequence.state = state

    def wait_for(self, sequence: GuidedSequence) -> bool:
        """Wait until the answer is of all the output. False: it is late."""
        self._send_ids()
        while not sequence.is_current:
            left_s = self._wait_until - self._clock()
            self.take_news(max(left_s, 0.0))
            if left_s <= 0.0:
                return sequence.is_current
        return True

    def _send_ids(self) -> None:
        if self._new_ids:
            self._outbox.send(AdvanceMatchers(tuple(self._new_ids)))
            self._new_ids.clear()
            self._wait_until = self._clock() + MAX_WAIT_S
        else:
            self._outbox.flush()

    def _open_again(self) -> None:
        self._new_ids.clear()
        for sequence in self._sequences.values():
            self._outbox.send(OpenMatcher(sequence.handle, sequence.guide, sequence.output_ids))
