"""Processes of a ring die at random moments, and no caller can tell: every request ends as in a ring in which
nobody died, to the bit.

The ring is in memory and the callers are real Sessions (tests.harness.ring.mortal_ring); the worker is the
fake one, whose tokens, logprobs and logits follow from what it reads through the page table.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from carousel.client.core.mailbox import Mailbox
from carousel.client.core.request.submission import Submission
from carousel.client.core.ring_state import RestartedRole
from carousel.client.core.session import Session
from carousel.client.core.state.request_state import RequestState
from runtime.base.errors import CarouselError, Overloaded, RequestError
from runtime.launcher.deaths.restart_budget import RestartBudget
from runtime.text.tokenizer import Tokenizer
from runtime.wire.format import unpack_ids
from runtime.wire.handle import NO_HANDLE
from runtime.wire.sampling_params import SamplingParams
from tests.harness.ring.mortal_ring import PIECE_TOKENS, ROLES, MortalRing
from tests.harness.simulation.fake_sampling import NUM_TOP, VOCAB_SIZE
from tests.harness.simulation.sim_reference import EOS_IDS

CHARACTERS = "!\"#$%&'()*+,-./0123456789:;"
MAX_TURNS = 20_000
POISON = 95


@dataclass(slots=True)
class Wish:
    """Requests of a caller."""

    prompt: list[int]
    sampling: SamplingParams
    stream: bool
    is_aborted: bool = False


@dataclass(slots=True)
class Asked:
    wish: Wish
    session: Session[Mailbox]
    state: RequestState
    mailbox: Mailbox
    texts: dict[int, str] = field(default_factory=dict)
    """Text of each sequence, put together from what came piece by piece."""

    @property
    def error(self) -> CarouselError | None:
        return self.state.error

    @property
    def has_ended(self) -> bool:
        return self.state.ended or self.error is not None

    def look(self) -> None:
        for delta in self.state.receive(self.mailbox.take_now()):
            self.texts[delta.index] = self.texts.get(delta.index, "") + delta.text


def draw(rng: random.Random) -> Wish:
    max_tokens = rng.randrange(1, 24)
    kind = rng.choice(["plain", "plain", "strings", "words", "min_tokens", "penalty", "ngram", "decay"])
    ids = [token for token in range(3, VOCAB_SIZE) if token not in EOS_IDS]
    n = rng.choice([1, 1, 1, 2, 3])
    is_stream = rng.random() < 0.6
    sampling = SamplingParams(
        n=n,
        best_of=n + 1 if not is_stream and rng.random() < 0.2 else None,
        seed=rng.randrange(1 << 30),
        max_tokens=max_tokens,
        min_tokens=rng.randrange(max_tokens + 1) if kind == "min_tokens" else 0,
        stop=tuple(rng.sample(CHARACTERS, rng.randrange(1, 6))) if kind == "strings" else (),
        stop_words_ids=tuple((rng.choice(ids), rng.choice(ids))[: rng.choice([1, 1, 2])] for _ in range(4))
        if kind == "words"
        else (),
        presence_penalty=0.5 if kind == "penalty" else 0.0,
        no_repeat_ngram_size=2 if kind == "ngram" else 0,
        allowed_token_ids=tuple(rng.sample(ids, 6)) if kind == "ngram" else (),
        top_p_decay=0.9 if kind == "decay" else 1.0,
        top_p_min=0.1 if kind == "decay" else 0.0,
        include_stop_str_in_output=rng.random() < 0.3,
        logprobs=rng.choice([None, None, 0, NUM_TOP]),
        prompt_logprobs=rng.choice([None, None, None, 2]),
        return_context_logits=rng.random() < 0.1,
        return_generation_logits=rng.random() < 0.1,
        ignore_eos=rng.random() < 0.4,
    )
    prompt = [token for token in rng.choices(ids, k=rng.randrange(1, 30)) if token != POISON] or [7]
    return Wish(prompt, sampling, is_stream, rng.random() < 0.05)


def serve(
    demo: Tokenizer, wishes: list[Wish], rng: random.Random, deaths: float, most_deaths: int = 40
) -> tuple[list[Asked], MortalRing]:
    """Ask for everything, a few at a time; somebody dies with probability `deaths` in each turn."""
    ring = MortalRing(demo, rng)
    try:
        sessions = [ring.connect() for _ in range(2)]
        waiting, asked = list(wishes), list[Asked]()
        for _ in range(MAX_TURNS):
            running = [each for each in asked if not each.has_ended]
            if not waiting and not running and ring.is_at_rest:
                break
            if waiting and len(running) < 14:
                wish = waiting.pop(0)
                session = rng.choice(sessions)
                asked.append(
                    Asked(
                        wish,
                        session,
                        *session.open_request(Submission(wish.prompt, wish.sampling, wish.stream)),
                    )
                )
            for each in running:
                if rng.random() < 0.3:
                    each.look()
                if each.wish.is_aborted and rng.random() < 0.1:
                    each.session.abort(each.state.number)
            if deaths and rng.random() < deaths and sum(ring.num_deaths.values()) < most_deaths:
                role = rng.choice(ROLES)
                # Who runs alone would rightly be blamed.
                if role != "engine" or ring.status.solitary == NO_HANDLE:
                    ring.kill(role)
            ring.turn()
        else:
            raise AssertionError("no rest")
        ring.check()
        assert not any(session._requests or session.num_in_flight for session in sessions)
        return asked, ring
    finally:
        ring.close()


def result(asked: Asked) -> dict[str, Any]:
    """Everything that the caller can see but how much was cached."""
    assert asked.error is None, asked.error
    completion = asked.state.completion()
    for each in asked.state.sequences:
        assert asked.texts.get(each.index, "") == each.text, "a stream repeated or lost something"
    return {
        "prompt_tokens": completion.usage.prompt_tokens,
        "completion_tokens": completion.usage.completion_tokens,
        "prompt_logprobs": completion.prompt_logprobs,
        "context_logits": None if completion.context_logits is None else completion.context_logits.tobytes(),
        "outputs": [
            (
                output.text,
                output.token_ids,
                output.logprobs,
                output.finish_reason,
                output.matched_stop,
                output.cumulative_logprob,
                None if output.generation_logits is None else output.generation_logits.tobytes(),
            )
            for output in completion.outputs
        ],
    }


def compare(demo: Tokenizer, seed: int, num_requests: int) -> dict[RestartedRole, int]:
    rng = random.Random(seed)
    wishes = [draw(rng) for _ in range(num_requests)]
    undisturbed, _ = serve(demo, wishes, random.Random(seed), deaths=0.0)
    disturbed, ring = serve(demo, wishes, random.Random(seed), deaths=0.05)
    for number, (one, other) in enumerate(zip(undisturbed, disturbed, strict=True)):
        if one.wish.is_aborted:
            short, long = one.state.token_ids, other.state.token_ids
            shared = min(len(short), len(long))
            assert short[:shared] == long[:shared], number
        else:
            assert result(one) == result(other), f"seed {seed}, request {number}: {one.wish}"
    return ring.num_deaths


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.full)])
def test_250_random_requests_are_answered_as_if_nobody_had_died(demo: Tokenizer, seed: int) -> None:
    num_deaths = compare(demo, seed, 250)
    assert min(num_deaths.values()) > 3, "a test in which nobody dies says little"


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(100, 140))
def test_10000_random_requests_are_answered_as_if_nobody_had_died(demo: Tokenizer, seed: int) -> None:
    compare(demo, seed, 250)


def test_a_full_queue_refuses_nothing_that_a_death_has_interrupted(demo: Tokenizer) -> None:
    rng = random.Random(3)
    ring = MortalRing(demo, rng, max_waiting=30)
    try:
        sessions = [ring.connect() for _ in range(2)]
        wishes = [
            Wish([3, seed], SamplingParams(max_tokens=40, ignore_eos=True, seed=seed), stream=True)
            for seed in range(4, 4 + ring.system.rows.max_rows + 30)
        ]
        asked = [
            Asked(wish, session, *session.open_request(Submission(wish.prompt, wish.sampling, True)))
            for wish, session in zip(wishes, itertools.cycle(sessions), strict=False)
        ]
        while ring.status.num_running + ring.status.num_waiting < len(asked):
            ring.turn()
        late = Asked(
            wishes[0], sessions[0], *sessions[0].open_request(Submission([3], SamplingParams(), True))
        )
        while not late.has_ended:
            ring.turn()
            late.look()
        assert isinstance(late.error, Overloaded)
        for number in range(MAX_TURNS):
            ring.turn()
            for each in asked:
                each.look()
            if all(each.has_ended for each in asked) and ring.is_at_rest:
                break
            if number < 400 and rng.random() < 0.1:
                ring.kill(rng.choice(ROLES), is_fault=False)
        else:
            raise AssertionError("no rest")
        ring.check()
        assert min(ring.num_deaths.values()) > 3
        assert [len(result(each)["outputs"][0][1]) for each in asked] == [40] * len(asked)
    finally:
        ring.close()


@pytest.mark.parametrize("role", ROLES)
def test_a_long_answer_that_is_not_streamed_comes_however_often_somebody_dies(
    demo: Tokenizer, role: RestartedRole
) -> None:
    """Each time after a small part of it: who began again from the start would not get anywhere."""
    ring = MortalRing(demo, random.Random(7))
    try:
        session = ring.connect()
        wish = Wish([3, 4], SamplingParams(max_tokens=60, ignore_eos=True, seed=1), stream=False)
        asked = Asked(wish, session, *session.open_request(Submission(wish.prompt, wish.sampling, False)))
        num_known = 0
        for _ in range(MAX_TURNS):
            ring.turn()
            asked.look()
            running = [] if not ring.is_whole else ring.system.rows.running_requests()
            if running and running[0].num_output >= num_known + 2 * PIECE_TOKENS:
                num_known = len(asked.state.token_ids)
                ring.kill(role, is_fault=False)
            if asked.has_ended and ring.is_at_rest:
                break
        else:
            raise AssertionError("no rest")
        ring.check()
    finally:
        ring.close()
    undisturbed, _ = serve(demo, [wish], random.Random(7), deaths=0.0)
    assert result(asked) == result(undisturbed[0])
    assert ring.num_deaths[role] > 3


def test_a_request_that_kills_the_engine_runs_alone_and_is_then_refused(demo: Tokenizer) -> None:
    """Whoever has it in a step dies. Those who were there beside it are answered all the same."""
    rng = random.Random(5)
    wishes = [draw(rng) for _ in range(12)]
    wishes[4] = Wish([3, POISON], SamplingParams(max_tokens=8, seed=1), stream=True)
    expected, _ = serve(demo, [w for i, w in enumerate(wishes) if i != 4], random.Random(5), deaths=0.0)

    ring = MortalRing(demo, rng)
    try:
        session = ring.connect()
        asked = [
            Asked(w, session, *session.open_request(Submission(w.prompt, w.sampling, w.stream)))
            for w in wishes
        ]
        for _ in range(MAX_TURNS):
            ring.turn()
            for each in asked:
                each.look()
            running = [] if not ring.is_whole else ring.system.rows.running_requests()
            if ring.status.solitary != NO_HANDLE and running:
                assert len(running) == 1, "somebody runs beside one that is to run alone"
            if any(POISON in unpack_ids(req.tokens.tobytes())[: req.num_prompt] for req in running):
                ring.kill("engine")
            if all(each.has_ended for each in asked) and ring.is_at_rest:
                break
        else:
            raise AssertionError("no rest")
        ring.check()
    finally:
        ring.close()
    assert ring.num_deaths["engine"] == 3
    error = asked[4].error
    assert isinstance(error, RequestError)
    assert (error.code, error.status) == ("quarantined", 400)
    others = [each for i, each in enumerate(asked) if i != 4]
    for one, other in zip(expected, others, strict=True):
        if not one.wish.is_aborted:
            assert result(one) == result(other)


def test_callers_who_hang_up_and_send_another_request_that_kills_the_engine_end_no_launch(
    demo: Tokenizer,
) -> None:
    """Two at a time, ten times. All others are answered, and the budget of restarts is not spent."""
    rng = random.Random(6)
    wishes = [draw(rng) for _ in range(12)]
    for wish in wishes:
        wish.is_aborted = False
    expected, _ = serve(demo, wishes, random.Random(6), deaths=0.0)
    ring, budget = MortalRing(demo, rng), RestartBudget(window_s=60.0)
    try:
        session = ring.connect()

        def ask(wish: Wish) -> Asked:
            submission = Submission(wish.prompt, wish.sampling, wish.stream)
            return Asked(wish, session, *session.open_request(submission))

        def ask_poison() -> list[Asked]:
            sampling = SamplingParams(max_tokens=8, seed=1)
            return [ask(Wish([3 + rng.randrange(20), POISON], sampling, stream=True)) for _ in range(2)]

        asked, poison = list(map(ask, wishes)), ask_poison()
        for _ in range(MAX_TURNS):
            ring.turn()
            for each in asked:
                each.look()
            running = [] if not ring.is_whole else ring.system.rows.running_requests()
            if any(POISON in unpack_ids(req.tokens.tobytes())[: req.num_prompt] for req in running):
                ring.kill("engine")
                verdict = ring.death_counts.verdict
                budget.spend("engine", 5, ring.now, from_outside=False, verdict=verdict)
                for each in poison:
                    session.forget(each.state.number)
                poison = ask_poison() if ring.num_deaths["engine"] < 10 else []
            if all(each.has_ended for each in asked) and ring.is_at_rest:
                break
        else:
            raise AssertionError("no rest")
        ring.check()
    finally:
        ring.close()
    assert ring.num_deaths["engine"] == 10
    for one, other in zip(expected, asked, strict=True):
        assert result(one) == result(other)
