"""The grammar process and the scheduler's end of it, when frames arrive about sequences that nobody has."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from grammar_proc.loop import GrammarLoop
from grammar_proc.vocabulary import GrammarVocabulary
from runtime.base.errors import ProtocolMismatch
from runtime.settings.config import DEMO_MODEL
from runtime.wire.format import NO_CONTENT
from runtime.wire.guide import Guide, MatcherState
from runtime.wire.handle import make_handle
from runtime.wire.messages import UNIONS, GuideRefused, OpenMatcher
from runtime.wire.transport import DECODE_ERRORS, MemoryChannel, MessageCodec
from scheduler_proc.features.grammar_client import GrammarClient
from tests.harness.guides.grammar_ring import Trial
from tests.harness.ring.hostile_frames import hostile_frames
from tests.harness.ring.launched import wait_until

MAX_S = 5.0
NUM_STRANGERS = 200
NUM_FRAMES = 20_000
NUM_UNREAD = 2
GOOD = Guide("regex", "a+")
BAD = Guide("regex", "a{")


@pytest.fixture(scope="module")
def vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary(DEMO_MODEL, num_threads=2)


class Asking:
    """A sequence of the scheduler with a guide."""

    def __init__(self, number: int) -> None:
        self.handle = make_handle(1, number)
        self.tenant = ""
        self.content = NO_CONTENT
        self.guide = GOOD
        self.state: MatcherState | None = None
        self.output_ids = b""

    @property
    def is_current(self) -> bool:
        return self.state is not None

    def begin_again(self) -> None:
        self.state = None


class Ends:
    """Both ends, with the sockets between them in memory."""

    def __init__(self, vocabulary: GrammarVocabulary, capacity: int = 1000) -> None:
        self.grammar_in = MemoryChannel("grammar_in")
        self.masks = MemoryChannel("grammar_out", capacity=capacity)
        self.refusals = MemoryChannel("scheduler_in")
        trial: Any = Trial(vocabulary)
        self.loop = GrammarLoop(self.grammar_in, self.refusals, self.masks, vocabulary, trial)
        self.client = GrammarClient(self.grammar_in.send, lambda _: self.masks.drain(), lambda: 0.0)

    def turn(self) -> None:
        """Let the grammar process work, and the scheduler take what has come from it."""
        self.loop.turn()
        self.client.take_news()

    def turn_until(self, is_so: Callable[[], bool]) -> None:
        """Take turns until something is so. Raises TimeoutError."""

        def turn_and_look() -> bool:
            self.turn()
            return is_so()

        wait_until(turn_and_look, MAX_S, "what has come is done")


def test_sequences_that_no_scheduler_has_leave_nothing(vocabulary: GrammarVocabulary) -> None:
    ends = Ends(vocabulary)
    own = Asking(0)
    ends.client.open(own)
    for number in range(1, NUM_STRANGERS + 1):
        assert ends.grammar_in.send(OpenMatcher(make_handle(2, number), (GOOD, BAD)[number % 2]))
    ends.turn_until(lambda: own.is_current and ends.loop.num_sequences == 1)
    assert ends.loop.num_matchers == 1
    refusals = [each for each in ends.refusals.drain() if isinstance(each, GuideRefused)]
    assert len(refusals) == NUM_STRANGERS // 2
    ends.client.close(own.handle)
    ends.turn_until(lambda: ends.loop.num_sequences == 0)
    assert ends.loop.num_matchers == 0


def test_mutated_frames_leave_no_sequences(vocabulary: GrammarVocabulary) -> None:
    ends = Ends(vocabulary)
    codec = MessageCodec(UNIONS["grammar_in"], 0)
    most = 0
    for number, frames in enumerate(hostile_frames("grammar_in", 0, NUM_FRAMES, random.Random(1))):
        try:
            ends.grammar_in.send(codec.decode(frames[0], any_epoch=True))
        except (ProtocolMismatch, *DECODE_ERRORS):
            continue
        if number % 100 == 0:
            ends.turn()
            most = max(most, ends.loop.num_sequences)
    assert most > 0
    ends.turn_until(lambda: ends.loop.num_sequences == 0)
    assert ends.loop.num_matchers == 0


def test_nothing_is_read_while_answers_have_no_room(vocabulary: GrammarVocabulary) -> None:
    ends = Ends(vocabulary, capacity=NUM_UNREAD)
    own = Asking(0)
    ends.client.open(own)
    ends.turn_until(lambda: own.is_current)
    for number in range(NUM_STRANGERS):
        assert ends.grammar_in.send(OpenMatcher(make_handle(2, number), GOOD))
        ends.loop.turn()
    assert not ends.loop.reads
    assert ends.loop.num_sequences <= NUM_UNREAD + 2
    ends.turn_until(lambda: ends.loop.num_sequences == 1)
    assert ends.loop.reads
