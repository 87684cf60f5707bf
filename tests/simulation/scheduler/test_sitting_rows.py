"""Costs to other requests of rows that sit out, and of steps that wait for masks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from runtime.wire.format import TOKEN_BYTES
from runtime.wire.messages import ControlRequest, FromGrammar
from scheduler_proc.core.sitting_rows import MAX_SIT_S
from scheduler_proc.features.guided import CAUTION, PAUSE
from scheduler_proc.features.mask_patience import (
    LEAST_S,
    MAX_CREDIT_S,
    SHARE,
    USUAL_S,
    MaskPatience,
)
from scheduler_proc.loop import PAUSED_S, RETRY_S, SchedulerLoop
from tests.harness.scheduler.scheduler_parts import run_until_idle
from tests.harness.simulation import sim_grammar
from tests.harness.simulation.sim_grammar import FakeGrammar
from tests.harness.simulation.sim_system import System
from tests.simulation.scheduler.test_guided_rows import delay, guessing, request, serving


def test_rows_whose_masks_never_come_leave_their_places_to_others() -> None:
    """They kept rows and pages until the grammar process was back, and nobody else could begin."""
    guided = [request(number, "long", max_tokens=40) for number in range(3)]
    with serving() as (alone, _):
        run_until_idle(alone, *guided)
        expected = [alone.detokenizer.tokens[each.handle] for each in guided]
    with serving(depth=2, max_rows=3) as (system, grammar):
        for each in guided:
            system.inbox.send(each)
        for _ in range(8):
            system.step()
        grammar.is_dead = True
        plain = request(3, "", max_tokens=10)
        system.inbox.send(plain)
        began = system.now
        while plain.handle not in system.detokenizer.closed:
            system.step()
            assert system.now - began < MAX_SIT_S + 2.0
        grammar.start()
        run_until_idle(system)
        assert [system.detokenizer.tokens[each.handle] for each in guided] == expected


def test_a_row_that_sits_for_a_moment_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    guided, plain = request(0, "long", max_tokens=10), request(3, "", max_tokens=200)
    delay(monkeypatch, {guided.handle: 0.8 * MAX_SIT_S})
    with serving(depth=2, max_len=256) as (system, _):
        run_until_idle(system, guided, plain, max_steps=2000)
        assert system.stats.num_late_masks > 0
        assert system.lifecycle.num_retracted == 0


@pytest.mark.parametrize("other", ["plain", "guided"])
def test_a_step_does_not_hold_up_rows_that_are_in_other_ones(
    monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """In a pipeline of two stages each of these two rows has steps of its own, and only the rows of the step
    counted. So each step of the first waited for the most, and the second row with it.
    """
    slow = request(0, "long", max_tokens=40)
    held_up = request(2, "long" if other == "guided" else "", max_tokens=60)
    held_up = msgspec.structs.replace(held_up, tenant="another")
    delay(monkeypatch, {slow.handle: 0.035})
    with serving(depth=2, num_stages=2) as (system, _):
        began = system.now
        run_until_idle(system, slow, held_up, max_steps=2000)
        took_s = system.now - began
        assert system.stats.mask_wait_s <= MAX_CREDIT_S + SHARE * took_s + 5 * (LEAST_S + USUAL_S)
        assert [len(system.detokenizer.tokens[each.handle]) for each in (slow, held_up)] == [40, 60]


def test_masks_that_are_there_give_those_that_are_late_no_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that sit out take part with masks that are there; they added to the usual time of each step."""
    slow = [request(number, "long", max_tokens=30) for number in range(3)]
    plain = request(3, "", max_tokens=150)
    delay(monkeypatch, {each.handle: 0.07 for each in slow})
    begin, numbers = MaskPatience.begin, list[int]()

    def begun(patience: MaskPatience, now_s: float, num_masks: int, *rest: Any, **options: Any) -> None:
        numbers.append(num_masks)
        begin(patience, now_s, num_masks, *rest, **options)

    monkeypatch.setattr(MaskPatience, "begin", begun)
    with serving(depth=2, max_len=256) as (system, _):
        run_until_idle(system, *slow, plain, max_steps=2000)
        assert system.stats.num_late_masks == 3
    assert numbers[0] == 3
    assert max(numbers[5:]) == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_are_on_their_way_before_a_step_waits_for_masks(
    monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """With a long model step, they waited for the masks of the next one for up to a second."""
    guided, plain = request(0, "long", max_tokens=20), request(3, "", max_tokens=40)
    delay(monkeypatch, {guided.handle: 0.03})
    news, systems, num_waits = FakeGrammar.news, list[System](), 0

    def waits(grammar: FakeGrammar, wait_s: float) -> list[FromGrammar]:
        nonlocal num_waits
        if wait_s > 0.0:
            num_waits += 1
            systems[0].deliver()
            for req in systems[0].lifecycle.requests.values():
                assert len(systems[0].detokenizer.tokens.get(req.handle, ())) == req.num_output
        return news(grammar, wait_s)

    monkeypatch.setattr(FakeGrammar, "news", waits)
    with serving(depth=depth) as (system, _):
        systems.append(system)
        run_until_idle(system, guided, plain)
        assert num_waits > 0


def delay_guesses(monkeypatch: pytest.MonkeyPatch, seconds: list[float]) -> list[int]:
    """Have masks behind guesses take these numbers of seconds, one after the other, and the last one from
    then on. Returns a list that gets the number of guesses each time some are told.
    """
    answer, numbers = FakeGrammar._answer, list[int]()

    def answered(grammar: FakeGrammar, handle: bytes, guesses: bytes = b"") -> None:
        took_s = (seconds.pop(0) if len(seconds) > 1 else seconds[0]) if guesses else 0.0
        numbers.extend([len(guesses) // TOKEN_BYTES] if guesses else [])
        monkeypatch.setattr(FakeGrammar, "delay_s", lambda _, __: took_s)
        answer(grammar, handle, guesses)

    monkeypatch.setattr(FakeGrammar, "_answer", answered)
    monkeypatch.setattr(sim_grammar, "SHORT", 0.0)  # it gives none up
    return numbers


def run_guessing(system: System, num_tokens: int, ids: list[int]) -> list[int]:
    """Run a guided request that guesses right at each token, beside another one. Returns its output."""
    guided = request(1, "long", max_tokens=num_tokens)
    guessing(system, [[], ids, [], []], 3, lambda _: False)
    run_until_idle(system, guided, request(3, "", max_tokens=3 * num_tokens), max_steps=4000)
    return system.detokenizer.tokens[guided.handle]


@pytest.fixture(scope="module")
def long_output() -> list[int]:
    asked = request(1, "long", max_tokens=300)
    with serving(num_pages=1000, max_len=1000) as (system, _):
        run_until_idle(system, asked, max_steps=2000)
        return system.detokenizer.tokens[asked.handle]


def test_masks_behind_guesses_that_always_take_long_hold_up_others_once(
    monkeypatch: pytest.MonkeyPatch, long_output: list[int]
) -> None:
    """Before, a step of all rows waited for them once in 64 tokens of the row, while there was credit."""
    numbers = delay_guesses(monkeypatch, [0.2])
    with serving(depth=1, num_pages=1000, max_len=1000) as (system, _):
        assert run_guessing(system, 300, long_output) == long_output
        assert 4 <= len(numbers) <= 6  # it tries now and then
        assert system.stats.num_late_masks == len(numbers)
        assert system.stats.mask_wait_s <= LEAST_S + 4 * USUAL_S + MAX_CREDIT_S + 1e-6


def test_masks_behind_guesses_that_come_in_time_again_are_used_again(
    monkeypatch: pytest.MonkeyPatch, long_output: list[int]
) -> None:
    """The first come late; the next are there at once. Later ones are waited for as the first."""
    numbers = delay_guesses(monkeypatch, [0.2, 0.0])
    with serving(depth=1, num_pages=1000, max_len=1000) as (system, _):
        assert run_guessing(system, 300, long_output) == long_output
        assert system.stats.num_late_masks == 1
        assert len(numbers) > (300 - PAUSE) // 4 - 2


@pytest.mark.parametrize(("num_quick", "num_late"), [(CAUTION // 4 - 1, 2), (CAUTION // 4 + 2, 2)])
def test_a_step_waits_for_guesses_again_only_after_as_many_tokens_in_time(
    monkeypatch: pytest.MonkeyPatch, long_output: list[int], num_quick: int, num_late: int
) -> None:
    delay_guesses(monkeypatch, [0.2, *[0.0] * num_quick, 0.2])
    with serving(depth=1, num_pages=1000, max_len=1000) as (system, _):
        run_guessing(system, PAUSE + 4 * num_quick + 20, long_output)
        assert system.stats.num_late_masks == num_late
        has_waited = system.stats.mask_wait_s > 0.05
        assert has_waited == (4 * num_quick > CAUTION)


@contextmanager
def sitting_out() -> Iterator[tuple[System, FakeGrammar, SchedulerLoop]]:
    """A loop whose only row sits out, and whose masks come through its port."""
    with serving(depth=2) as (system, grammar):
        port = system.port
        port._grammar = SimpleNamespace(drain=lambda: grammar.news(0.0))
        port._wait_for_grammar = system.pass_time
        grammar._client._news = port.grammar_news
        loop = SchedulerLoop(system.scheduler)
        system.inbox.send(request(1, "long"))
        for _ in range(6):
            system.pass_time(RETRY_S)
            loop.turn()
        grammar.is_dead = True
        while not loop.turn():
            system.pass_time(RETRY_S)
        assert system.rows.num_sitting == 1
        yield system, grammar, loop


def rests(system: System, loop: SchedulerLoop) -> tuple[str, float]:
    """Take another turn. Returns the kind of wait that follows, and its seconds."""
    system.pass_time(RETRY_S)
    found: list[tuple[str, float]] = []
    waits = [partial(lambda name, s: found.append((name, s)), name) for name in ("message", "masks", "time")]
    loop.rest(loop.turn(), *waits)
    return found[0]


def test_a_loop_whose_rows_sit_out_sleeps_until_their_masks_come() -> None:
    """Before, it looked for them every 2 ms."""
    with sitting_out() as (system, grammar, loop):
        assert rests(system, loop) == ("masks", PAUSED_S)
        grammar.start()
        for _ in range(2):  # the matcher is opened again, and its mask comes
            system.pass_time(RETRY_S)
            timeout_s = loop.turn()
        assert timeout_s == 0.0


def test_a_loop_does_not_wait_for_masks_that_it_does_not_read() -> None:
    with sitting_out() as (system, _, loop):
        system.inbox.send(ControlRequest(1, 1, "pause_generation", mode="in_place"))
        loop.turn()
        assert rests(system, loop) == ("message", PAUSED_S)


def test_a_loop_whose_rows_sit_out_looks_soon_for_what_wakes_nobody() -> None:
    with sitting_out() as (system, grammar, loop):
        grammar._refusal = 1.0  # it has no room
        system.inbox.send(request(2, "long"))
        loop.turn()
        assert rests(system, loop) == ("message", RETRY_S)
        grammar._refusal = 0.0
        assert rests(system, loop) == ("masks", PAUSED_S)
        system.scheduler.lifecycle.slots.num_loading = 1
        assert rests(system, loop) == ("message", RETRY_S)
