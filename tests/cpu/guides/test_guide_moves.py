"""Sequences whose compiled guide is used up move to another copy of it, and their outputs are the same."""

from __future__ import annotations

import random
from typing import Any

import pytest

from grammar_proc import vocabulary as limits
from grammar_proc.compile_child import Compiled, try_guide
from grammar_proc.guides.guide_memory import GuideCopy
from grammar_proc.matching.matchers import GuideUsedUp, Matchers
from grammar_proc.vocabulary import GrammarVocabulary
from runtime.settings.config import DEMO_MODEL
from runtime.wire.format import pack_ids, unpack_ids
from runtime.wire.guide import Guide, MatcherNews, MatcherState
from runtime.wire.hypotheses import FROM_THE_START, BranchMatchers, BranchStates
from runtime.wire.messages import ErrorInfo, MatcherStates, OpenMatcher
from tests.cpu.guides.test_matchers import id_of
from tests.harness.guides.grammar_ring import GrammarRing, ids_in, states_of

STATES = Guide("regex", "(.*a.{21}|.*b.{31}){2}.{500}")
"""Has new states with each token: too many for FEW_STATES after 130."""
STEPS = Guide("regex", "(.*[a-m].{15}){2}.{500}")
"""Has steps that make too many states, after 105 tokens or more."""
FEW_STATES = 1 << 13


@pytest.fixture
def few_states(monkeypatch: pytest.MonkeyPatch) -> GrammarVocabulary:
    """Vocabulary whose guides have few states."""
    monkeypatch.setattr(limits, "MAX_LEXER_STATES", FEW_STATES)
    return GrammarVocabulary(DEMO_MODEL, num_threads=2)


@pytest.fixture(scope="module")
def vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary(DEMO_MODEL, num_threads=2)


def outputs(
    vocabulary: GrammarVocabulary, guide: Guide, most: list[int], *, alone: bool = False
) -> list[Any]:
    """Return output and error of a sequence for each of `most`, all at once, or each alone."""
    ring = GrammarRing(vocabulary)
    found = []
    for seed, each in enumerate(most):
        found.append(ring.open(seed.to_bytes(16), guide, each, seed))
        if alone:
            ring.run()
            ring = GrammarRing(vocabulary)
    ring.run()
    assert not ring.loop.num_matchers
    return [(each.ids, each.error) for each in found]


def test_outputs_that_use_up_a_guide_together_go_on_as_if_alone(few_states: GrammarVocabulary) -> None:
    most = [60 + 8 * number for number in range(8)]
    alone = outputs(few_states, STATES, most, alone=True)
    assert [(len(ids), error) for ids, error in alone] == [(each, None) for each in most]
    assert outputs(few_states, STATES, most) == alone


@pytest.mark.parametrize("guide", [STATES, STEPS], ids=["states", "steps"])
def test_an_output_that_is_too_much_for_a_guide_alone_ends_and_no_other(
    vocabulary: GrammarVocabulary, few_states: GrammarVocabulary, guide: Guide
) -> None:
    where = few_states if guide is STATES else vocabulary
    most = [500, 90, 80, 70, 60]
    alone = outputs(where, guide, most, alone=True)
    together = outputs(where, guide, most)
    assert together[1:] == alone[1:]
    assert [(len(ids), error) for ids, error in alone[1:]] == [(each, None) for each in most[1:]]
    ids, error = together[0]
    assert error is not None
    assert (error.code, error.status) == ("guide_too_complex", 400)
    assert error.message.startswith("the guide is too complex: lexer error: too many")
    assert len(ids) >= 100
    assert ids[:100] == alone[0][0][:100]


def test_a_guide_that_earlier_outputs_have_used_up_is_compiled_anew(few_states: GrammarVocabulary) -> None:
    ring = GrammarRing(few_states)
    found = []
    for number in range(6):
        found.append(ring.open(number.to_bytes(16), STATES, 100, number))
        ring.run()
    assert [(len(each.ids), each.error) for each in found] == [(100, None)] * 6
    assert len(ring.trial.tried) == 1, "its grammar is known"


def test_wrong_guesses_use_up_a_guide_and_their_sequence_goes_on(few_states: GrammarVocabulary) -> None:
    """They are not followed in its next copy, so that the tokens of its output alone count there."""
    grammar = try_guide(STATES, few_states).grammar
    first, second = GuideCopy(few_states.compile(grammar)), GuideCopy(few_states.compile(grammar))
    matchers, draw = Matchers(few_states), random.Random(3)
    matchers.open(b"s", first, b"")
    (state,) = matchers.news(64)
    while isinstance(state, MatcherState):
        guesses = draw.choices(ids_in(state.masks[0]), k=40)
        matchers.advance(MatcherNews(b"s", 0, guesses=pack_ids(guesses)))
        (state,) = matchers.news(64)
    assert state == GuideUsedUp(first)
    matchers.leave(b"s")
    assert not matchers.has_news
    assert not first.handles
    matchers.resume(b"s", second)
    (state,) = matchers.news(64)
    assert isinstance(state, MatcherState)
    assert (state.num_tokens, len(state.masks), state.is_short) == (0, 1, True)
    assert second.is_for_one


def test_ids_that_come_while_a_sequence_moves_are_followed_after_it(vocabulary: GrammarVocabulary) -> None:
    grammar = try_guide(Guide("regex", "a(b|c){2}z"), vocabulary).grammar
    first, second = GuideCopy(vocabulary.compile(grammar)), GuideCopy(vocabulary.compile(grammar))
    matchers = Matchers(vocabulary)
    a, b, z = (pack_ids([token]) for token in map(id_of, "abz"))
    for handle in (b"told", b"asks", b"told and asks"):
        matchers.open(handle, first, a)
    assert len(states_of(matchers)) == 3
    matchers.advance(MatcherNews(b"asks", 2, b))
    for handle in (b"told", b"asks", b"told and asks"):
        matchers.leave(handle)
    matchers.advance(MatcherNews(b"told and asks", 2, b))
    for handle in (b"told", b"asks", b"told and asks"):
        matchers.resume(handle, second)
    assert sorted(states_of(matchers)) == [b"asks", b"told and asks"]
    matchers.advance(MatcherNews(b"told", 3, b + b))
    state = states_of(matchers)[b"told"]
    assert (state.num_tokens, ids_in(state.masks[0])) == (3, unpack_ids(z).tolist())


def test_sequences_that_move_do_not_end_because_their_guide_cannot_be_tried_again(
    vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = GrammarRing(vocabulary)
    guide, handle = Guide("regex", "[a-z]{60}"), b"a" * 16
    one = ring.open(handle, guide, 60)
    while len(one.ids) < 5:
        ring.turn()
    guides, copy = ring.loop._guides, ring.loop._matchers.copy_of(handle)
    assert copy is not None
    guides._ready.forget(guides._guide_of[handle])  # so the next one has it tried again
    refused = Compiled(error=ErrorInfo("no process was free", "overloaded", None, 503))
    monkeypatch.setattr("tests.harness.guides.grammar_ring.try_guide", lambda *_: refused)
    other = ring.open(b"b" * 16, guide, 60, 1)
    ring.loop._receive(ring.received.pop())
    guides.move(copy)
    ring.run()
    assert (one.error, other.error) == (None, None)
    assert min(len(one.ids), len(other.ids)) > 5


def test_a_search_begins_its_hypotheses_again_when_its_guide_is_used_up(
    few_states: GrammarVocabulary,
) -> None:
    """The state of its own matcher comes again, which is when a scheduler sends all hypotheses from their
    start.
    """
    ring = GrammarRing(few_states)
    ring.open(b"other", STATES, 1)
    ring.run()
    loop, search = ring.loop, b"search"
    ring.received.append(OpenMatcher(search, STATES))
    loop.turn()
    draw, ids, last = random.Random(1), list[int](), pack_ids([])
    while not any(isinstance(each, MatcherStates) for each in ring.sent[1:]):
        answer = next((each for each in ring.sent if isinstance(each, BranchStates)), None)
        mask = ring.sent[0].states[0].masks[0] if answer is None else answer.masks[0]
        ids.append(draw.choice(ids_in(mask)))
        last = pack_ids(ids[-1:])
        del ring.sent[1:]
        ring.received.append(
            BranchMatchers(search, len(ids), ((0 if len(ids) > 1 else FROM_THE_START, last),))
        )
        while len(ring.sent) < 2:
            loop.turn()
    again = next(each for each in ring.sent[1:] if isinstance(each, MatcherStates))
    assert [(state.handle, state.num_tokens) for state in again.states] == [(search, 0)]
    assert again == ring.sent[0]
    ring.sent.clear()
    ring.received.append(BranchMatchers(search, len(ids), ((0, last),)))
    loop.turn()
    assert not ring.sent, "it has no such hypothesis"
    ring.received.append(BranchMatchers(search, len(ids), ((FROM_THE_START, pack_ids(ids)),)))
    loop.turn()
    (states,) = ring.sent
    assert isinstance(states, BranchStates)
    alone = few_states.compile(try_guide(STATES, few_states).grammar)
    alone.consume_tokens(ids)
    assert states.masks == (few_states.masks([alone])[0].tobytes(),)
