"""Beam searches with guides: hypotheses are those of transformers with the same masks, however late."""

from __future__ import annotations

import json
import random
import time
from collections import deque
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from grammar_proc.branches import Branches
from grammar_proc.compile_child import try_guide
from grammar_proc.guides.guide_memory import GuideCopy
from grammar_proc.matching.matchers import Matchers
from grammar_proc.vocabulary import GrammarVocabulary
from runtime.checkpoint.checkpoint_config import CheckpointConfig
from runtime.settings.config import DEMO_MODEL
from runtime.wire.format import Message
from runtime.wire.guide import Guide, MatcherState
from runtime.wire.handle import next_sibling
from runtime.wire.hypotheses import BranchMatchers
from runtime.wire.messages import (
    AdvanceMatchers,
    CloseMatcher,
    FromGrammar,
    GrammarStarted,
    MatcherStates,
    OpenMatcher,
)
from scheduler_proc.features import mask_patience
from scheduler_proc.features.beam_search.search_guide import SearchGuide
from scheduler_proc.features.grammar_client import GrammarClient
from tests.cpu.beams.test_beams_against_transformers import checkpoint
from tests.harness.guides.branched import branched
from tests.harness.ring.beam_draws import Draw, Found, assert_same, draws, plain_draw, searched
from tests.harness.ring.serving_ring import Generated, Ring, Setting

NUM_TOKENS = 12
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name"],
}
GUIDES = (
    Guide("regex", "[a-z ]{1,9}[.]"),
    Guide("regex", "(yes|no|maybe)( [0-9]{1,3}){0,3}"),
    Guide("json_schema", json.dumps(PERSON), any_whitespace=False),
    Guide("choice", json.dumps([f"{word}{n}" for word in ("red", "green", "for i in ") for n in range(9)])),
)


@cache
def vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary(DEMO_MODEL, num_threads=1)


@cache
def grammar_for(guide: Guide) -> str:
    compiled = try_guide(guide, vocabulary())
    assert compiled.error is None
    return compiled.grammar


class NearGrammar:
    """The grammar process's matchers in this process. Answers may be late, and it may die."""

    def __init__(self, late: float = 0.0) -> None:
        """`late`: probability that an answer is there only when it is asked for again."""
        self.late = late
        self._rng = random.Random(4)
        self._answers: deque[FromGrammar] = deque()
        self.num_late = 0
        self.num_opened = 0
        self._begin()

    def _begin(self) -> None:
        self._matchers, self._branches = Matchers(vocabulary()), Branches(vocabulary())

    def die(self) -> None:
        self._begin()
        self._answers.clear()
        self._answers.append(GrammarStarted())

    def client(self) -> GrammarClient:
        return GrammarClient(self.send, self.news, time.monotonic)

    def send(self, message: Message) -> bool:
        if isinstance(message, OpenMatcher):
            self.num_opened += 1
            opened = GuideCopy(vocabulary().compile(grammar_for(message.guide)))
            self._matchers.open(message.handle, opened, b"")
        elif isinstance(message, BranchMatchers):
            copy = self._matchers.copy_of(message.handle)
            states = None if copy is None else branched(self._branches, copy.start, message)
            if states is not None:
                self._answers.append(states)
        elif isinstance(message, AdvanceMatchers):
            for news in message.entries:
                self._matchers.advance(news)
        elif isinstance(message, CloseMatcher):
            self._matchers.close(message.handle)
            self._branches.close(message.handle)
        for state in self._matchers.news(64):
            assert isinstance(state, MatcherState)
            self._answers.append(MatcherStates((state,)))
        return True

    def news(self, wait_s: float) -> list[FromGrammar]:
        if self._answers and self._rng.random() < self.late:
            self.num_late += 1
            return []
        answers = list(self._answers)
        self._answers.clear()
        return answers


class GuidedRing(Ring):
    def __init__(self, grammar: NearGrammar, path: Path = DEMO_MODEL) -> None:
        self._grammar = grammar
        super().__init__(path, Setting(beams=8))

    def make_grammar(self) -> GrammarClient:
        return self._grammar.client()


def asked(seed: int, count: int, num_tokens: int) -> list[tuple[Draw, Guide]]:
    some = draws(seed, count, CheckpointConfig.read(DEMO_MODEL).vocab_size, num_tokens)
    rng = random.Random(seed)
    return [
        (
            draw._replace(repetition=rng.choice([1.0, 1.3]), min_tokens=rng.choice([0, 3, 6])),
            rng.choice(GUIDES),
        )
        for draw in some
    ]


def found_by(generated: dict[bytes, Generated], handle: bytes, n: int) -> list[Found]:
    """Fewer than `n` where the guide lets no more be found."""
    ranks = [generated[next_sibling(handle, number)] for number in range(n)]
    return [
        Found(each.tokens, each.closed.beam.score)
        for each in ranks
        if each.closed is not None and each.closed.beam is not None
    ]


def run(ring: Ring, some: list[tuple[Draw, Guide]]) -> list[list[Found]]:
    try:
        handles = [ring.submit(draw.prompt, draw.sampling, guide=guide) for draw, guide in some]
        generated = ring.run()
    finally:
        ring.close()
    return [found_by(generated, handle, draw.n) for handle, (draw, _) in zip(handles, some, strict=True)]


def check(seed: int, count: int, num_tokens: int) -> None:
    torch.set_num_threads(1)
    model, _ = checkpoint("demo", DEMO_MODEL)
    eos_ids = CheckpointConfig.read(DEMO_MODEL).eos_token_ids
    some = asked(seed, count, num_tokens)
    for (draw, guide), got in zip(some, run(GuidedRing(NearGrammar()), some), strict=True):
        start = vocabulary().compile(grammar_for(guide))
        stop_ids = [*eos_ids, *draw.more_stop_ids]

        def allowed_after(output: list[int]) -> list[int]:
            matcher = start.deep_copy()  # noqa: B023
            if not matcher.consume_tokens(output):
                return [0]  # a hypothesis that is none: its score is as low as can be
            (mask,) = vocabulary().masks([matcher])
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            # An output that must go on goes on where it can.
            must_go_on = len(output) < draw.min_tokens and bool(bits.any())  # noqa: B023
            is_complete = matcher.is_accepting() and not must_go_on
            text = [token for token in np.flatnonzero(bits).tolist() if is_complete or token not in stop_ids]  # noqa: B023
            return sorted({*text, *(stop_ids if is_complete else ())}) or [0]  # noqa: B023

        wanted = searched(model, draw._replace(min_tokens=0), eos_ids, allowed_after=allowed_after)
        assert_same(got, [each for each in wanted if each.score > -1e8], draw)


def test_hypotheses_with_guides_are_those_of_transformers_with_their_masks() -> None:
    check(seed=31, count=10, num_tokens=NUM_TOKENS)


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_hypotheses_with_guides_are_those_of_transformers_in_many_draws() -> None:
    check(seed=32, count=120, num_tokens=30)


def test_a_mask_that_is_late_and_a_grammar_process_that_dies_change_no_hypothesis(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    some = asked(33, 8, NUM_TOKENS)
    wanted = run(GuidedRing(NearGrammar()), some)
    monkeypatch.setattr(mask_patience, "MAX_WAIT_S", 0.0)
    grammar = NearGrammar(late=0.7)
    assert run(GuidedRing(grammar), some) == wanted
    assert grammar.num_late > 20
    mortal = NearGrammar()
    ring = GuidedRing(mortal)
    step, num_steps = ring.scheduler.step, 0

    def dying_step(inbox: list[object]) -> bool:
        nonlocal num_steps
        num_steps += 1
        if num_steps in (4, 8):
            mortal.die()
        if num_steps == 7:
            for req in ring.lifecycle.kv.rows.running_requests():
                ring.lifecycle.retract(req)
        return step(inbox)  # type: ignore[arg-type]

    monkeypatch.setattr(ring.scheduler, "step", dying_step)
    assert run(ring, some) == wanted
    assert mortal.num_opened >= 2 * len(some)
    assert ring.lifecycle.num_retracted


def test_a_search_that_begins_again_waits_for_its_masks_as_if_none_had_been_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mask_patience, "MAX_WAIT_S", 0.0)
    waited: list[int] = []
    wait = SearchGuide.wait

    def noted(guide: SearchGuide) -> bool:
        waited.append(guide._num_tokens)
        return wait(guide)

    monkeypatch.setattr(SearchGuide, "wait", noted)
    grammar = NearGrammar()
    ring = GuidedRing(grammar)
    ((draw, guide),) = asked(33, 1, NUM_TOKENS)
    try:
        ring.submit(draw.prompt, draw.sampling, guide=guide)
        for _ in range(5):
            ring.scheduler.step([])
        assert not waited, "masks that are there are waited for"
        grammar.late = 1.0
        for _ in range(8):
            ring.scheduler.step([])
        assert len(waited) == 1, "a mask that is late is waited for once"
        ring.lifecycle.retract(*ring.lifecycle.kv.rows.running_requests())
        grammar.late = 0.0
        while not ring.lifecycle.kv.rows.running_requests():
            ring.scheduler.step([])
        grammar.late = 1.0
        for _ in range(8):
            ring.scheduler.step([])
        assert len(waited) == 2, "it waits for no mask after one that was late in its last stay"
        grammar.late = 0.0
        ring.run()
    finally:
        ring.close()
    assert waited[0] > waited[1]


def test_an_output_ends_before_its_min_tokens_only_where_nothing_may_follow() -> None:
    prompt, letters, word = [5, 6, 7], Guide("regex", "[a-z]{0,40}"), Guide("choice", '["no"]')
    ends = tuple((each, 30.0) for each in CheckpointConfig.read(DEMO_MODEL).eos_token_ids)
    early = plain_draw(prompt, NUM_TOKENS)._replace(stopping=1, n=4, bias=ends)
    late = early._replace(min_tokens=5)
    some = [(early, letters), (late, letters), (late, word)]
    at_once, at_least, short = run(GuidedRing(NearGrammar()), some)
    # The end token is counted.
    assert min(len(each.tokens) for each in at_once) == 1
    assert min(len(each.tokens) for each in at_least) == 6
    assert short
    assert max(len(each.tokens) for each in short) <= 3


def test_without_an_end_token_a_hypothesis_ends_where_nothing_may_follow() -> None:
    """Its score is of what it says alone, and it ends before its tokens are used up."""
    torch.set_num_threads(1)
    model, _ = checkpoint("demo", DEMO_MODEL)
    words = [f"{word}{n}" for word in ("red", "green") for n in range(4)]
    guides = (Guide("choice", json.dumps(words)), Guide("regex", "[a-z]{2}"))
    draw = plain_draw([5, 6, 7], 30)._replace(n=4, stopping=2, penalty=0.7)
    sampling = msgspec.structs.replace(draw.sampling, ignore_eos=True)
    ring = GuidedRing(NearGrammar())
    try:
        handles = [ring.submit(draw.prompt, sampling, guide=guide) for guide in guides]
        generated = ring.run()
    finally:
        ring.close()
    for handle, guide in zip(handles, guides, strict=True):
        found = found_by(generated, handle, draw.n)
        assert len({tuple(each.tokens) for each in found}) == draw.n
        for number, each in enumerate(found):
            closed = generated[next_sibling(handle, number)].closed
            assert closed is not None
            assert (closed.reason, closed.stop_token) == ("stop", -1)
            matcher = vocabulary().compile(grammar_for(guide)).deep_copy()
            assert matcher.consume_tokens(each.tokens)
            assert matcher.is_accepting()
            whole = torch.tensor([[*draw.prompt, *each.tokens]])
            with torch.inference_mode():
                logprobs = model(whole).logits[0].log_softmax(-1)[len(draw.prompt) - 1 : -1]
            total = logprobs.gather(1, torch.tensor(each.tokens)[:, None]).sum().item()
            assert each.score == pytest.approx(total / len(each.tokens) ** 0.7, abs=1e-4)
        assert [each.score for each in found] == sorted((each.score for each in found), reverse=True)
