"""Matchers and their masks over the demo tokenizer: lists of choices, and guides that are too much work."""

from __future__ import annotations

import json
import math
import os
import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tokenizers import Tokenizer

from grammar_proc import branches as branching
from grammar_proc.backend import BackendVocabulary
from grammar_proc.branches import Branches
from grammar_proc.compile_child import try_guide
from grammar_proc.guides import ready_guides
from grammar_proc.guides.guide_memory import GuideCopy, HeapMeter, resident_bytes
from grammar_proc.guides.ready_guides import ReadyGuides
from grammar_proc.matching import state_maker
from grammar_proc.matching.matcher_entry import MaskPlace
from grammar_proc.matching.matchers import GuideBroken, Matchers
from grammar_proc.open_backend import open_vocabulary
from grammar_proc.vocabulary import GrammarVocabulary
from runtime.base.mask_memory import MaskMemory
from runtime.settings.config import DEMO_MODEL
from runtime.wire.format import pack_ids
from runtime.wire.guide import Guide, MatcherNews, MatcherState
from runtime.wire.hypotheses import FROM_THE_START, BranchMatchers
from runtime.wire.messages import OpenMatcher
from tests.harness.guides.branched import branched
from tests.harness.guides.grammar_ring import GrammarRing, ids_in, states_of

AMBIGUOUS = Guide("lark", "start: a\na: /[a-z]/ a a | /[a-z]/ a | /[a-z]/ | /[a-z]/ a a a")
"""Texts of it can be read in more ways with each letter."""


@pytest.fixture(scope="module")
def vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary(DEMO_MODEL, num_threads=2)


@pytest.fixture(scope="module", params=["llguidance", "xgrammar"])
def either(request: pytest.FixtureRequest) -> BackendVocabulary[Any]:
    """BackendVocabulary of each backend."""
    return open_vocabulary(request.param, DEMO_MODEL, num_threads=2)


def text_of(ids: list[int]) -> str:
    tokenizer: Any = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    text: str = tokenizer.decode(ids, skip_special_tokens=False)
    return text


def id_of(token: str) -> int:
    tokenizer: Any = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    token_id: int = tokenizer.token_to_id(token)
    return token_id


def all_news(matchers: Matchers) -> Iterator[MatcherState | GuideBroken]:
    """News of all sequences, none of which is a search or has used up its guide."""
    while matchers.has_news:
        for each in matchers.news(64):
            assert isinstance(each, MatcherState | GuideBroken)
            yield each


class Followed:
    """Sequences whose tokens are drawn among those that their masks allow."""

    def __init__(self, vocabulary: BackendVocabulary[Any], **guides: Guide) -> None:
        self.matchers = Matchers(vocabulary)
        self.ids: dict[bytes, list[int]] = {}
        self.states: dict[bytes, MatcherState] = {}
        self.broken: dict[bytes, str] = {}
        self._rng = random.Random(1)
        for name, guide in guides.items():
            compiled = try_guide(guide, vocabulary)
            assert compiled.error is None, compiled.error
            self.ids[name.encode()] = []
            self.matchers.open(name.encode(), GuideCopy(vocabulary.compile(compiled.grammar)), b"")

    def step(self) -> None:
        for state in all_news(self.matchers):
            if isinstance(state, GuideBroken):
                self.broken[state.handle] = state.message
                self.states.pop(state.handle, None)
            else:
                self.states[state.handle] = state
        for handle, state in list(self.states.items()):
            allowed = ids_in(state.masks[0])
            if not allowed:
                del self.states[handle]
                continue
            token = self._rng.choice(allowed)
            self.ids[handle].append(token)
            self.matchers.advance(MatcherNews(handle, len(self.ids[handle]), pack_ids([token])))


def test_a_guide_whose_tokens_take_too_long_ends_and_those_beside_it_go_on(
    vocabulary: GrammarVocabulary,
) -> None:
    both = Followed(vocabulary, bad=AMBIGUOUS, good=Guide("regex", "[a-z ]{4000}"))
    slowest = 0.0
    while len(both.ids[b"good"]) < 200:
        began = time.process_time()
        both.step()
        slowest = max(slowest, time.process_time() - began)
    assert set(both.broken) == {b"bad"}
    assert "too complex" in both.broken[b"bad"]
    assert slowest < 2.0  # it was 7.7 s
    assert re.fullmatch("[a-z ]{200,}", text_of(both.ids[b"good"]))


def test_time_that_is_taken_is_counted_against_the_sequence_that_takes_it(
    vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_maker, "FAIR_STEP_S", 0.0)
    monkeypatch.setattr(state_maker, "MAX_EXCESS_S", 0.003)
    followed = Followed(vocabulary, a=Guide("regex", "[a-z ]{900}"))
    for _ in range(400):
        followed.step()
    assert "takes too long" in followed.broken[b"a"]
    assert not len(followed.matchers)


@pytest.mark.parametrize("prefix", ["x", "word " * 20])
def test_as_many_choices_as_a_list_may_have(either: BackendVocabulary[Any], prefix: str) -> None:
    choices = [f"{prefix}{number}yz" for number in range(10_000 if prefix == "x" else 2_000)]
    guide = Guide("choice", json.dumps(choices))
    followed = Followed(either, **{f"s{at}": guide for at in range(5)})
    while followed.matchers.has_news:
        followed.step()
    assert not followed.broken
    texts = set(map(text_of, followed.ids.values()))
    assert texts <= set(choices)
    assert len(texts) > 1


def state_of(matchers: Matchers) -> MatcherState:
    (state,) = matchers.news(64)
    assert isinstance(state, MatcherState)
    return state


def test_masks_behind_guesses_are_those_of_the_guessed_ids(either: BackendVocabulary[Any]) -> None:
    """Up to the first guess that may not come; to look ahead changes nothing of the sequence itself."""
    start = either.compile(try_guide(Guide("regex", "a(b|c){2}(dz)?"), either).grammar)
    a, b, c, d, z = map(id_of, "abcdz")
    matchers = Matchers(either)
    matchers.open(b"s", GuideCopy(start), b"")
    first = state_of(matchers)
    assert (first.are_complete, first.guesses) == ((False,), b"")

    def ask(num_tokens: int, new: list[int], guesses: list[int]) -> MatcherState:
        matchers.advance(MatcherNews(b"s", num_tokens, pack_ids(new), pack_ids(guesses)))
        state = state_of(matchers)
        assert (state.num_tokens, state.guesses, state.is_short) == (num_tokens, pack_ids(guesses), False)
        return state

    def mask_of(*ids: int) -> bytes:
        matcher = start.deep_copy()
        assert matcher.consume_tokens(list(ids))
        mask: bytes = either.masks([matcher]).tobytes()
        return mask if any(mask) else b""

    assert ask(0, [], [a, b, c, d]).masks == tuple(mask_of(*[a, b, c, d][:at]) for at in range(5))
    assert ask(0, [], [a, z, c]).masks == (mask_of(), mask_of(a))
    assert ask(0, [], [z]).masks == (mask_of(),)
    closing = ask(1, [a], [b, b, d, z, a])
    assert closing.masks == (*(mask_of(a, *[b, b, d][:at]) for at in range(4)), b"")
    assert closing.are_complete == (False, False, True, False, True)
    assert ask(1, [], [c]).masks == (mask_of(a), mask_of(a, c))
    assert ask(3, [b, c], []).masks == (mask_of(a, b, c),)
    assert ask(3, [], [0, d]).masks == (mask_of(a, b, c),), "the end token is no text"


def test_masks_behind_guesses_lie_side_by_side_and_those_beyond_are_sent(
    vocabulary: GrammarVocabulary,
) -> None:
    start = vocabulary.compile(try_guide(Guide("regex", "[ab]{9}"), vocabulary).grammar)
    a, b = map(id_of, "ab")
    memory = MaskMemory.create(6, 4 * -(-4096 // 32))
    matchers = Matchers(vocabulary)
    matchers.open(b"s", GuideCopy(start), b"", MaskPlace(memory, 3, 3))
    assert state_of(matchers).masks == (3,)
    matchers.advance(MatcherNews(b"s", 0, guesses=pack_ids([a, b, a, b])))
    state = state_of(matchers)
    assert state.masks[:3] == (3, 4, 5)
    assert [ids_in(each) != [] for each in state.masks[3:]] == [True, True]
    assert not any(memory.slot(2))
    assert ids_in(bytes(memory.slot(5))) == ids_in(bytes(memory.slot(3)))


def test_who_makes_no_guesses_does_not_wait_for_the_masks_behind_those_of_others(
    vocabulary: GrammarVocabulary,
) -> None:
    start = vocabulary.compile(try_guide(Guide("regex", "[ab]{90}"), vocabulary).grammar)
    ids = pack_ids([id_of("a")] * 8)
    matchers = Matchers(vocabulary)
    for name in (b"p", b"q"):
        matchers.open(name, GuideCopy(start), b"")
    matchers.advance(MatcherNews(b"p", 0, guesses=ids))
    assert list(states_of(matchers)) == [b"q", b"p"]


def test_guesses_that_take_too_long_are_given_up_and_their_sequence_goes_on(
    vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = vocabulary.compile(try_guide(Guide("regex", "[ab]{90}"), vocabulary).grammar)
    ids = [id_of("a")] * 8
    matchers = Matchers(vocabulary)
    matchers.open(b"s", GuideCopy(start), b"")
    state_of(matchers)
    monkeypatch.setattr(state_maker, "FAIR_STEP_S", 1e-6)
    matchers.advance(MatcherNews(b"s", 0, guesses=pack_ids(ids)))
    state = state_of(matchers)
    assert state.is_short
    assert 1 <= len(state.masks) <= len(ids)
    monkeypatch.setattr(state_maker, "FAIR_STEP_S", 9.0)
    matchers._entries[b"s"].guess_excess_s = state_maker.MAX_EXCESS_S + 1.0
    matchers.advance(MatcherNews(b"s", 0, guesses=pack_ids(ids)))
    state = state_of(matchers)
    assert (state.is_short, len(state.masks)) == (True, 1)
    matchers.advance(MatcherNews(b"s", 1, pack_ids(ids[:1])))
    assert not state_of(matchers).is_short


def test_guides_that_are_kept_are_bounded_in_number_and_size(
    vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ready_guides, "MAX_READY", 3)
    monkeypatch.setattr(ready_guides, "MAX_READY_CHARS", 100)
    start = vocabulary.compile(try_guide(Guide("regex", "a"), vocabulary).grammar)
    ready = ReadyGuides()

    def add(key: bytes, num_chars: int) -> GuideCopy:
        copy = GuideCopy(start, "x" * num_chars)
        ready.add(key, copy)
        return copy

    a, _, _ = (add(key, 10) for key in (b"a", b"b", b"c"))
    assert ready.get(b"a") is a
    add(b"d", 10)
    assert [ready.get(key) is None for key in (b"a", b"b", b"c", b"d")] == [False, True, False, False]
    add(b"large", 85)
    assert [ready.get(key) is None for key in (b"a", b"c", b"d", b"large")] == [True, True, False, False]
    larger = add(b"larger", 200)
    assert (len(ready), ready.get(b"larger")) == (1, larger)
    e = add(b"e", 10)
    assert (len(ready), ready.get(b"e")) == (1, e)
    ready.forget(b"e", larger)
    assert len(ready) == 1, "another copy of it"


def test_masks_of_a_tenant_with_slow_guides_come_after_those_of_another(
    vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    matchers: Any = Matchers(vocabulary)
    start = vocabulary.compile(try_guide(Guide("regex", "[a-z]+"), vocabulary).grammar)
    clock = 0.0

    def states(handles: list[bytes], until_s: float) -> list[bytes]:
        nonlocal clock
        clock += sum(0.02 if handle.startswith(b"alice") else 0.0001 for handle in handles)
        for handle in handles:
            del matchers._changed[handle]
        return handles

    monkeypatch.setattr(matchers, "_states", states)
    monkeypatch.setattr("grammar_proc.matching.matchers.time.monotonic", lambda: clock)
    for number in range(40):
        matchers.open(b"alice%d" % number, GuideCopy(start), b"", None, "alice")
        matchers.open(b"bob%d" % number, GuideCopy(start), b"", None, "bob")
    order: list[Any] = []
    while sum(each.startswith(b"bob") for each in order) < 40:
        order.extend(matchers.news(64))
    assert len(order) <= 43, "both had about the same time"
    for _ in range(5):
        (one,) = matchers.news(64)
        assert one.startswith(b"alice"), "no more than probably take AT_ONCE_S"
    matchers.open(b"bob0", GuideCopy(start), b"", None, "bob")
    assert list(matchers.news(64)) == [b"bob0"], "it is next"
    for handle in list(matchers._entries):
        if handle.startswith(b"bob"):
            matchers.close(handle)
    assert len(list(matchers.news(64))) == HeapMeter().num_masks_at_once, "alone it has all that there are"


def test_compiled_guides_of_a_flood_take_the_place_of_its_own(
    vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = vocabulary.compile(try_guide(Guide("regex", "a"), vocabulary).grammar)
    monkeypatch.setattr(ready_guides, "MAX_READY", 4)
    monkeypatch.setattr(ready_guides, "MAX_READY_CHARS", 100)
    ready = ReadyGuides()
    ready.add(b"of bob", of_bob := GuideCopy(start, "x" * 10, "bob"))
    for number in range(20):
        ready.add(b"%d" % number, GuideCopy(start, "x" * 10, "alice"))
    assert (len(ready), ready.get(b"of bob")) == (4, of_bob)
    ready.add(b"large", GuideCopy(start, "x" * 85, "alice"))
    assert (len(ready), ready.get(b"of bob")) == (2, of_bob)
    ready.add(b"larger", larger := GuideCopy(start, "x" * 200, "alice"))
    assert (len(ready), ready.get(b"larger")) == (1, larger), "the newest stays"


def test_a_tenant_cannot_tell_by_the_time_what_guides_another_has_used(vocabulary: GrammarVocabulary) -> None:
    ring = GrammarRing(vocabulary)
    for number, tenant in enumerate(["alice", "alice", "bob", "", "bob"]):
        ring.open(number.to_bytes(16), Guide("choice", '["a", "b"]'), 1, tenant=tenant)
        ring.run()
    assert [tenant for tenant, _ in ring.trial.tried] == ["alice", "bob", ""]
    assert len(set(ring.trial.tried)) == len({key for _, key in ring.trial.tried}) == 3


def test_sequences_that_wait_for_a_guide_keep_one_copy_of_it(vocabulary: GrammarVocabulary) -> None:
    """A thousand of a guide of 120 KB took 120 MB."""
    messages = [OpenMatcher(number.to_bytes(16), Guide("regex", f"{'a' * 99}")) for number in range(3)]
    assert messages[0].guide is not messages[1].guide
    ring = GrammarRing(vocabulary)
    for message in messages:
        ring.loop._receive(message)
    (waiting,) = ring.loop._guides._waits.values()
    assert len(waiting) == 3
    assert len({id(message.guide) for message in waiting.values() if message is not None}) == 1


def test_a_guide_has_only_so_many_states(
    vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_maker, "MAX_EXCESS_S", math.inf)
    pattern = "(.*a.{21}|.*b.{31}|.*c.{16}|.*e.{26}){3}.{500}"
    followed = Followed(vocabulary, a=Guide("regex", pattern))
    before = resident_bytes()
    while not followed.broken:
        followed.step()
    assert "too many states" in followed.broken[b"a"]
    assert resident_bytes() - before < 80 << 20


def test_many_objects_of_many_texts_follow_one_guide(
    vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 32,768 states the fifth object, and each one after it, was refused."""
    monkeypatch.setattr(state_maker, "MAX_EXCESS_S", math.inf)
    texts = {f"f{number}": {"type": "string", "maxLength": 50 + number} for number in range(60)}
    schema = {"type": "object", "properties": texts, "required": list(texts), "additionalProperties": False}
    guide = Guide("json_schema", json.dumps(schema))
    followed = Followed(vocabulary)
    start = vocabulary.compile(try_guide(guide, vocabulary).grammar)
    for number in range(6):
        followed.ids[handle := b"%d" % number] = []
        followed.matchers.open(handle, GuideCopy(start), b"")
    followed.step()
    while followed.states:
        followed.step()
    assert not followed.broken


def test_the_thread_that_compiles_gives_way_and_no_other_does() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, 0)

    before = niceness()
    with ThreadPoolExecutor(1, initializer=ready_guides._give_way) as executor:
        assert executor.submit(niceness).result() == max(before, ready_guides.COMPILE_NICENESS)
    assert niceness() == before


def test_a_guide_that_is_compiled_again_leaves_the_other_threads_their_turns(
    either: BackendVocabulary[Any],
) -> None:
    """Masks of others are made by one of them: a compiler that kept the interpreter would have them wait."""
    count = 4000 if isinstance(either, GrammarVocabulary) else 400  # of which each takes as long
    names = [f"k{number}" for number in range(count)]
    wide = {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": names}
    compiled = try_guide(Guide("json_schema", json.dumps(wide)), either)
    assert compiled.error is None, compiled.error
    num_turns = 0
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(either.compile, compiled.grammar)
        while not made.done():
            time.sleep(0.001)
            num_turns += 1
    assert not made.result().is_error()
    assert num_turns > 8


def test_hypotheses_that_fork_have_the_masks_of_their_own_ids(either: BackendVocabulary[Any]) -> None:
    start = either.compile(try_guide(Guide("regex", "(ab|ac){3}z"), either).grammar)
    a, b, c = map(id_of, "abc")
    branches = Branches(either)

    def follow(num_tokens: int, *entries: tuple[int, list[int]]) -> tuple[bytes, ...]:
        packed = tuple((parent, pack_ids(ids)) for parent, ids in entries)
        states = branched(branches, start, BranchMatchers(b"s", num_tokens, packed))
        assert states is not None
        return states.masks

    def mask_of(*ids: int) -> bytes:
        matcher = start.deep_copy()
        assert matcher.consume_tokens(list(ids))
        masks: bytes = either.masks([matcher]).tobytes()
        return masks

    assert follow(1, (FROM_THE_START, [a])) == (mask_of(a),)
    assert follow(2, (0, [b]), (0, [c])) == (mask_of(a, b), mask_of(a, c))
    assert mask_of(a) != mask_of(a, b)
    assert follow(3, (1, [a]), (1, [a])) == (mask_of(a, c, a),) * 2
    assert follow(3, (FROM_THE_START, [a, b, a]), (0, [c])) == (mask_of(a, b, a), mask_of(a, c, a, c))
    assert branched(branches, start, BranchMatchers(b"s", 5, ((2, pack_ids([a])),))) is None, "there are two"
    with pytest.raises(GuideBroken):
        follow(5, (0, [a]))
    branches.close(b"s")
    assert branched(branches, start, BranchMatchers(b"s", 2, ((0, pack_ids([b])),))) is None


def test_time_that_hypotheses_take_is_counted_against_their_search(
    vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(branching, "FAIR_STEP_S", 0.0)
    monkeypatch.setattr(branching, "MAX_EXCESS_S", 0.003)
    start = vocabulary.compile(try_guide(Guide("regex", "[a-z ]{900}"), vocabulary).grammar)
    a = id_of("a")
    branches = Branches(vocabulary)
    branched(branches, start, BranchMatchers(b"s", 1, ((FROM_THE_START, pack_ids([a])),)))

    def follow() -> None:
        for num_tokens in range(2, 400):
            branched(branches, start, BranchMatchers(b"s", num_tokens, ((0, pack_ids([a])),)))

    with pytest.raises(GuideBroken, match="takes too long"):
        follow()
