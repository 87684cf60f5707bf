"""Grammar process's loop in this process, and sequences whose tokens are drawn among those that their masks
allow, as a scheduler does it.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from grammar_proc.backend import BackendVocabulary
from grammar_proc.compile_child import Compiled, try_guide
from grammar_proc.loop import GrammarLoop
from grammar_proc.matching.matchers import Matchers
from runtime.ring.suspects.in_hand import SequencesInHand
from runtime.wire.format import pack_ids
from runtime.wire.guide import Guide, MatcherNews, MatcherState
from runtime.wire.messages import (
    AdvanceMatchers,
    CloseMatcher,
    ErrorInfo,
    GuideRefused,
    MatcherStates,
    OpenMatcher,
)

MAX_S = 60.0
IDLE_S = 0.0005


def ids_in(mask: bytes | int) -> list[int]:
    """Return the ids of a mask that came in a message."""
    assert isinstance(mask, bytes)
    ids: list[int] = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()
    return ids


def states_of(matchers: Matchers) -> dict[bytes, MatcherState]:
    """Return the states of all sequences that have changed, none of which is broken."""
    states = {}
    while matchers.has_news:
        for state in matchers.news(64):
            assert isinstance(state, MatcherState)
            states[state.handle] = state
    return states


class Trial:
    """Takes the place of GuideCompiler: notes what is tried, and tries it at once."""

    def __init__(self, vocabulary: BackendVocabulary[Any]) -> None:
        self.files: list[int] = []
        self.is_busy = False
        self.tried: list[tuple[str, bytes]] = []
        self._vocabulary = vocabulary
        self._done: list[tuple[bytes, Compiled]] = []

    def refusal(self, key: bytes) -> None: ...

    def cancel(self, key: bytes) -> None: ...

    def begin(self, key: bytes, guide: Guide, tenant: str) -> None:
        self.tried.append((tenant, key))
        self._done.append((key, try_guide(guide, self._vocabulary)))

    def poll(self) -> list[tuple[bytes, Compiled]]:
        done, self._done = self._done, []
        return done


@dataclass(slots=True)
class Followed:
    """Sequence with a guide."""

    draw: random.Random
    most: int
    ids: list[int] = field(default_factory=list)
    is_over: bool = False
    error: ErrorInfo | None = None


class GrammarRing:
    def __init__(self, vocabulary: BackendVocabulary[Any], in_hand: SequencesInHand | None = None) -> None:
        self.trial = Trial(vocabulary)
        self.sequences: dict[bytes, Followed] = {}
        self.received: list[Any] = []
        self.sent: list[Any] = []

        def send(message: Any) -> bool:
            self.sent.append(message)
            return True

        inbox: Any = SimpleNamespace(drain=self._drain)
        outbox: Any = SimpleNamespace(send=send)
        trial: Any = self.trial
        self.loop = GrammarLoop(inbox, outbox, outbox, vocabulary, trial, in_hand=in_hand)

    def _drain(self, most: int, max_bytes: int) -> list[Any]:
        messages, self.received = self.received, []
        return messages

    def open(self, handle: bytes, guide: Guide, most: int, seed: int = 0, tenant: str = "") -> Followed:
        """Begin a sequence that ends after `most` tokens."""
        self.sequences[handle] = Followed(random.Random(seed), most)
        self.received.append(OpenMatcher(handle, guide, tenant=tenant))
        return self.sequences[handle]

    def turn(self) -> None:
        """Let the loop do its work, and draw the next tokens of the sequences whose masks have come."""
        self.loop.turn()
        sent, self.sent[:] = list(self.sent), []
        if not sent:
            time.sleep(IDLE_S)  # the thread that compiles has the lowest priority
        for message in sent:
            if isinstance(message, GuideRefused):
                self._end(message.handle).error = message.error
            if not isinstance(message, MatcherStates):
                continue
            for state in message.states:
                self._go_on(state.handle, state.num_tokens, state.masks[0])

    def _go_on(self, handle: bytes, num_tokens: int, mask: bytes | int) -> None:
        each = self.sequences[handle]
        if each.is_over:
            return
        assert num_tokens == len(each.ids), "no mask comes twice, and none is left out"
        allowed = ids_in(mask)
        if not allowed or len(each.ids) == each.most:
            self._end(handle)
            return
        each.ids.append(each.draw.choice(allowed))
        news = MatcherNews(handle, len(each.ids), pack_ids(each.ids[-1:]))
        self.received.append(AdvanceMatchers((news,)))

    def _end(self, handle: bytes) -> Followed:
        self.sequences[handle].is_over = True
        self.received.append(CloseMatcher(handle))
        return self.sequences[handle]

    def run(self) -> None:
        """Go on until all sequences have ended."""
        deadline = time.monotonic() + MAX_S
        while not all(each.is_over for each in self.sequences.values()):
            assert time.monotonic() < deadline
            self.turn()
        self.turn()  # it is told of the last ends
