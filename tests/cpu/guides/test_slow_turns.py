"""Turns of the grammar process while a tenant has work that takes long: it is done in pieces, and others come
in between.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from grammar_proc.branches import Branches
from grammar_proc.matching.matchers import AT_ONCE_S
from grammar_proc.matching.state_maker import StateMaker
from grammar_proc.matching.time_shares import TimeShares
from grammar_proc.vocabulary import GrammarVocabulary
from runtime.settings.config import DEMO_MODEL
from runtime.wire.format import pack_ids
from runtime.wire.guide import Guide, MatcherNews
from runtime.wire.hypotheses import FROM_THE_START, BranchMatchers, BranchStates
from runtime.wire.messages import AdvanceMatchers, GuideRefused, MatcherStates, OpenMatcher
from tests.harness.guides.grammar_ring import GrammarRing, ids_in

WORDS = Guide("regex", "[a-z ]{90}")
NUM_SLOW = 24


@pytest.fixture(scope="module")
def vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary(DEMO_MODEL, num_threads=2)


class Slow:
    """A grammar loop in which some kinds of work take more CPU time than AT_ONCE_S each time."""

    def __init__(
        self, vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch, owner: Any, *names: str
    ) -> None:
        self.ring = GrammarRing(vocabulary)
        self.bob = b"bob"
        self.alice = [b"alice%d" % number for number in range(NUM_SLOW)]
        for handle in (*self.alice, self.bob):
            self.ring.open(handle, WORDS, 90, tenant="bob" if handle == self.bob else "alice")
        states = self._states_of(len(self.alice) + 1)
        self._first = {each.handle: ids_in(each.masks[0])[:1] for each in states}
        self.ring.loop._matchers._shares = TimeShares(AT_ONCE_S)  # what the beginning took is no part of it
        self.num_done = self._num_before_bob = 0
        for name in names:
            monkeypatch.setattr(owner, name, self._slow(getattr(owner, name)))

    def _slow(self, original: Any) -> Any:
        def slow(*arguments: Any) -> Any:
            self.num_done += 1
            self._num_before_bob += not self._is_bob_told()
            until_s = time.thread_time() + 1.5 * AT_ONCE_S
            while time.thread_time() < until_s:
                pass
            return original(*arguments)

        return slow

    def _states_of(self, count: int) -> list[Any]:
        states: list[Any] = []
        while len(states) < count:
            self.ring.loop.turn()
            states += [each for told in self.told(MatcherStates) for each in told.states]
        return states

    def told(self, kind: type) -> list[Any]:
        """Return the messages of a kind that the loop has sent, and forget all."""
        found = [each for each in self.ring.sent if isinstance(each, kind)]
        self.ring.sent.clear()
        return found

    def news_of(self, handle: bytes) -> MatcherNews:
        return MatcherNews(handle, 1, pack_ids(self._first[handle]))

    def num_done_before_bob(self) -> int:
        """Return how often the slow work was done before bob's mask came."""
        while not self._is_bob_told():
            self.ring.loop.turn()
        self.told(MatcherStates)
        return self._num_before_bob

    def _is_bob_told(self) -> bool:
        told = [each for each in self.ring.sent if isinstance(each, MatcherStates)]
        return any(state.handle == self.bob for each in told for state in each.states)


def test_a_search_with_slow_hypotheses_holds_up_others_for_one_at_most(
    vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(vocabulary, monkeypatch, Branches, "_go_on")
    search = BranchMatchers(slow.alice[0], 0, ((FROM_THE_START, b""),) * NUM_SLOW)
    slow.ring.received += [search, AdvanceMatchers((slow.news_of(slow.bob),))]
    assert slow.num_done_before_bob() <= 1
    turns = 0
    while not (found := slow.told(BranchStates)):
        slow.ring.loop.turn()
        turns += 1
    assert turns >= NUM_SLOW - 2, "each turn has one of them"
    assert (found[0].handle, len(found[0].masks)) == (slow.alice[0], NUM_SLOW)


def test_ids_of_slow_guides_hold_up_others_for_one_sequence_at_most(
    vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(vocabulary, monkeypatch, StateMaker, "_consume")
    news = tuple(slow.news_of(handle) for handle in (*slow.alice, slow.bob))
    slow.ring.received.append(AdvanceMatchers(news))
    assert slow.num_done_before_bob() <= 3, "one of alice, and bob's own"
    for _ in range(NUM_SLOW):
        slow.ring.loop.turn()
    assert slow.num_done == NUM_SLOW + 1


def test_a_turn_has_one_slow_call_at_most(
    vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An id was followed and its mask made in one turn."""
    slow = Slow(vocabulary, monkeypatch, StateMaker, "_consume", "masks")
    slow.ring.received.append(AdvanceMatchers(tuple(slow.news_of(handle) for handle in slow.alice)))
    came: list[int] = []
    """Number of states that had come after each turn."""
    while sum(came) < NUM_SLOW:
        before = slow.num_done
        slow.ring.loop.turn()
        assert slow.num_done - before <= 1
        came.append(sum(len(told.states) for told in slow.told(MatcherStates)))
    assert came == [0, 1] * NUM_SLOW, "none waits until all have been followed"


def test_slow_masks_that_are_made_one_by_one_have_a_turn_each(
    vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are after one that took long; all of a message were made in one turn."""
    slow = Slow(vocabulary, monkeypatch, GrammarVocabulary, "timed_mask")
    monkeypatch.setattr(slow.ring.loop._matchers._maker, "_times_each", True)
    slow.ring.received.append(AdvanceMatchers(tuple(slow.news_of(handle) for handle in slow.alice)))
    for number in range(NUM_SLOW):
        slow.ring.loop.turn()
        assert slow.num_done == number + 1
    assert sum(len(told.states) for told in slow.told(MatcherStates)) == NUM_SLOW


def test_an_output_that_was_slow_to_follow_and_does_not_match_is_told_so(
    vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(vocabulary, monkeypatch, GrammarVocabulary, "follow")
    digits = Guide("regex", "[0-9]{9}")
    slow.ring.received.append(OpenMatcher(b"carol", digits, slow.news_of(slow.bob).ids, tenant="carol"))
    while not (refused := slow.told(GuideRefused)):
        slow.ring.loop.turn()
    assert [(each.handle, each.error.param) for each in refused] == [(b"carol", "resume")]
