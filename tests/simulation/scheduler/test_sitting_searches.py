"""Beam searches with guides in the real scheduler: what late masks cost them, and others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from runtime.wire.guide import Guide
from runtime.wire.messages import FromGrammar, TokenizedRequest
from scheduler_proc.committer import MAX_HOLD_S
from scheduler_proc.features.guided import CAUTION
from scheduler_proc.features.mask_patience import LEAST_S, MAX_CREDIT_S, MAX_WAIT_S, SHARE, USUAL_S
from tests.harness.scheduler.scheduler_parts import message, run_until_idle
from tests.harness.simulation.group_simulation import NUM_TOP, consistent_logits
from tests.harness.simulation.sim_branches import FakeMatcher, make_branches
from tests.harness.simulation.sim_grammar import FakeGrammar
from tests.harness.simulation.sim_system import STEP_S, System
from tests.simulation.scheduler.test_guided_rows import delay, request, serving

LENGTH = 40


@contextmanager
def searching(late: float = 0.0, **changes: Any) -> Iterator[tuple[System, FakeGrammar]]:
    with serving(late, **{"depth": 2, "max_rows": 6, "max_len": 256, "num_pages": 256, **changes}) as served:
        system, grammar = served
        grammar.branches, grammar.start_of = make_branches(), FakeMatcher
        system.executor.num_top, system.executor.logits_of = NUM_TOP, consistent_logits
        yield served


def search(number: int, width: int = 2, max_tokens: int = LENGTH, **options: Any) -> TokenizedRequest:
    sampling = {"temperature": 0.0, "use_beam_search": True, "beam_width": width}
    asked = message(10 + number, [number + 1] * 7, max_tokens, sampling=sampling, **options)
    return msgspec.structs.replace(asked, guide=Guide("regex", "long"))


def outputs(system: System, asked: list[TokenizedRequest]) -> list[list[int]]:
    run_until_idle(system, *asked, max_steps=4000)
    system.kv.check()
    return [system.detokenizer.tokens[each.handle] for each in asked]


def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Have the seconds noted of all waits for the grammar process."""
    waits = list[float]()
    news = FakeGrammar.news

    def noted(grammar: FakeGrammar, wait_s: float) -> list[FromGrammar]:
        began_s = grammar.now_s()
        answers = news(grammar, wait_s)
        if grammar.now_s() > began_s:
            waits.append(grammar.now_s() - began_s)
        return answers

    monkeypatch.setattr(FakeGrammar, "news", noted)
    return waits


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("others", ["plain", "plain of the same tenant", "guided"])
def test_searches_whose_masks_always_take_long_hold_up_others_now_and_then(
    monkeypatch: pytest.MonkeyPatch, others: str, num_stages: int
) -> None:
    """Each of their tokens held up all rows for as long as these masks took."""
    searches = [search(0), search(1)]
    other = request(2, "long" if others == "guided" else "", max_tokens=150)
    other = msgspec.structs.replace(other, tenant="" if "same" in others else "another")
    with searching(num_stages=num_stages) as (system, _):
        expected = outputs(system, [*searches, other])
    delay(monkeypatch, {each.handle: 0.035 for each in searches})
    waits = waited(monkeypatch)
    with searching(num_stages=num_stages) as (system, _):
        began = system.now
        assert outputs(system, [*searches, other]) == expected
        took_s, waited_s = system.now - began, sum(waits)
        assert waited_s <= MAX_CREDIT_S + SHARE * took_s + 4 * (LEAST_S + 4 * USUAL_S)
        assert system.stats.num_late_masks <= len(searches) * (1 + LENGTH // CAUTION)
        assert system.stats.mask_wait_s == pytest.approx(waited_s)
        assert system.lifecycle.num_retracted == 0


def test_a_search_beside_which_nobody_waits_has_the_most_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = search(0)
    delay(monkeypatch, {asked.handle: 0.035})
    waits = waited(monkeypatch)
    with searching() as (system, _):
        run_until_idle(system, asked)
        assert system.stats.num_late_masks == 0
        assert waits == [pytest.approx(MAX_WAIT_S)] * (LENGTH - 1)  # as the fake one's waits pass


def test_searches_of_one_step_wait_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them waited by itself."""
    searches = [search(0), search(1)]
    other = request(2, "", max_tokens=100)
    delays = dict[bytes, float]()
    delay(monkeypatch, delays)
    waits = waited(monkeypatch)
    with searching() as (system, _):
        for each in (*searches, other):
            system.inbox.send(each)
        for _ in range(8):
            system.step()
        delays |= {each.handle: 10.0 for each in searches}
        while other.handle not in system.detokenizer.closed:
            system.step()
        assert sum(waits) == pytest.approx(MAX_CREDIT_S + LEAST_S + 4 * USUAL_S)
        assert len(waits) == 1
        assert system.stats.num_late_masks == 2


@pytest.mark.parametrize(("depth", "num_stages"), [(1, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("late", [0.3, 0.9])
def test_hypotheses_are_the_same_however_late_the_masks(depth: int, late: float, num_stages: int) -> None:
    asked = [search(0, 3, 20), search(1, 2, 30), request(2, "long", max_tokens=60)]
    with searching() as (system, _):
        expected = outputs(system, asked)
    with searching(late, depth=depth, num_stages=num_stages) as (system, _):
        assert outputs(system, asked) == expected
        assert system.stats.num_late_masks > 0


def test_a_search_sits_out_as_a_whole_and_computes_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, other = search(0, 3), request(2, "", max_tokens=150)
    with searching() as (system, _):
        outputs(system, [asked, other])
        num_computed = system.executor.num_computed
    delay(monkeypatch, {asked.handle: 5 * STEP_S})
    with searching() as (system, _):
        outputs(system, [asked, other])
        assert system.stats.num_late_masks > 0
        assert system.executor.num_computed == num_computed
        assert system.lifecycle.num_retracted == 0


def test_a_search_whose_masks_never_come_leaves_its_places_to_others() -> None:
    """It kept rows and pages until the grammar process was back, and nobody else could begin."""
    asked, other = search(0, 3), request(2, "", max_tokens=10)
    with searching() as (system, _):
        expected = outputs(system, [asked])
    with searching(max_rows=3) as (system, grammar):
        system.inbox.send(asked)
        for _ in range(8):
            system.step()
        grammar.is_dead = True
        system.inbox.send(other)
        began = system.now
        while other.handle not in system.detokenizer.closed:
            system.step()
            assert system.now - began < MAX_HOLD_S + 2.0
        grammar.start()
        run_until_idle(system)
        assert system.lifecycle.num_retracted == 1
        assert [system.detokenizer.tokens[asked.handle]] == expected


@pytest.mark.parametrize("num_steps", [17, 18])
def test_no_search_takes_masks_that_were_asked_for_while_it_waited(
    monkeypatch: pytest.MonkeyPatch, num_steps: int
) -> None:
    """A grammar process that was new then was asked about no hypotheses, for as many tokens as the search had
    had. If the answer came when it had as many again, it was taken.
    """
    asked = search(0, 3, 12)
    delays = dict[bytes, float]()
    delay(monkeypatch, delays)
    with searching() as (system, grammar):
        expected = outputs(system, [asked])
    with searching() as (system, grammar):
        system.inbox.send(asked)
        system.inbox.send(request(2, "", max_tokens=100))  # beside which the search is not waited for
        for _ in range(6):
            system.step()
        (req,) = [each for each in system.rows.running_requests() if each.group is not None]
        assert req.num_output > 2
        grammar._client.take_news()
        system.lifecycle.retract(req)
        grammar.die()
        grammar.start()
        grammar._client.take_news()
        delays[asked.handle] = num_steps * STEP_S
        grammar._client.take_news()
        delays[asked.handle] = 3 * STEP_S  # longer than a step: an answer that comes before it is taken
        run_until_idle(system)
        assert [system.detokenizer.tokens[asked.handle]] == expected


@pytest.mark.parametrize("others", [(), (request(3, "long"), search(1))])
def test_a_search_whose_places_nobody_could_take_keeps_what_it_has_found(
    others: tuple[TokenizedRequest, ...],
) -> None:
    """Before, it gave way to others that waited for their guides and could not start either."""
    asked = search(0, 3)
    with searching() as (system, _):
        expected = outputs(system, [asked])
    with searching(max_rows=3) as (system, grammar):
        system.inbox.send(asked)
        for _ in range(8):
            system.step()
        grammar.is_dead = True
        for each in others:
            system.inbox.send(each)
        for _ in range(round(3 * MAX_HOLD_S / STEP_S)):
            system.step()
        grammar.start()
        run_until_idle(system)
        assert system.lifecycle.num_retracted == 0
        assert all(each.handle in system.detokenizer.closed for each in others)
        assert [system.detokenizer.tokens[asked.handle]] == expected


def test_a_search_that_had_to_leave_sits_for_longer_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins again, and would never come past a token whose masks always take that long."""
    asked = search(0, 3, max_tokens=12)
    delay(monkeypatch, {asked.handle: 1.5 * MAX_HOLD_S})
    with searching(max_rows=3) as (system, _):
        system.inbox.send(asked)
        num_others = 0
        for _ in range(20_000):
            if not len(system.lifecycle.room):
                system.inbox.send(message(100 + num_others, [5] * 5, 4))
                num_others += 1
            system.step()
            if asked.handle in system.detokenizer.closed:
                break
        assert len(system.detokenizer.tokens[asked.handle]) == 12
        assert system.lifecycle.num_retracted == 1
        assert num_others > 1
