"""Guesses in the step loop: when a row may make some, and what pages they take."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from scheduler_proc.core.request import Request
from scheduler_proc.core.scheduled_row import ScheduledRow
from scheduler_proc.features.base import RequestFeature
from tests.harness.scheduler.scheduler_parts import SETTING, message, run_until_idle, running
from tests.harness.simulation.fake_sampling import VOCAB_SIZE
from tests.harness.simulation.sim_system import System

PROMPT = [7, 8, 9, 10]


class Guesser(RequestFeature):
    """Guesses the same output that another run had, or what is wrong everywhere."""

    def __init__(self, req: Request, output: list[int], num_guesses: int, wrong: int = 0) -> None:
        self._req = req
        self._output = output
        self._num_guesses = num_guesses
        self._wrong = wrong
        self.num_asked = self.num_too_early = 0

    def row_opened(self, row: int) -> None:
        self._req.rows.plan_when_committed(row, True, self)

    def plan_row(self, row: ScheduledRow[Any]) -> None:
        req = self._req
        self.num_asked += 1
        self.num_too_early += req.num_in_flight > 0
        room = min(self._num_guesses, req.max_len - req.num_tokens - 1)
        guesses = self._output[req.num_output : req.num_output + max(0, room)]
        row.guesses = [(token + self._wrong) % VOCAB_SIZE for token in guesses]


def output_of(max_tokens: int) -> list[int]:
    with running() as system:
        request = message(1, PROMPT, max_tokens=max_tokens)
        run_until_idle(system, request)
        return system.detokenizer.tokens[request.handle]


@contextmanager
def guessing(num_guesses: int, wrong: int = 0, **changes: Any) -> Iterator[tuple[System, list[Guesser]]]:
    """A system in which request 1 guesses its output."""
    features: list[Guesser] = []

    def attach(req: Request) -> RequestFeature | None:
        if req.tokens[: len(PROMPT)].tolist() != PROMPT:
            return None
        features.append(Guesser(req, output, num_guesses, wrong))
        return features[-1]

    output = output_of(40)
    system = System(dataclasses.replace(SETTING, **changes), random.Random(0), (attach,))
    try:
        yield system, features
    finally:
        system.executor.close()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_who_is_planned_when_its_tokens_are_here_never_has_one_in_flight(depth: int) -> None:
    with guessing(4, depth=depth) as (system, features):
        run_until_idle(system, message(1, PROMPT, max_tokens=40), message(2, [5] * 6, max_tokens=40))
        assert features[0].num_asked > 5
        assert features[0].num_too_early == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_perfect_guesses_give_one_token_more_than_there_are(depth: int) -> None:
    with guessing(4, depth=depth) as (system, _):
        request = message(1, PROMPT, max_tokens=40)
        run_until_idle(system, request)
        assert system.detokenizer.tokens[request.handle] == output_of(40)
        assert system.scheduler.num_steps == 8


def test_wrong_guesses_change_nothing_but_the_work() -> None:
    with guessing(4, wrong=1, depth=2) as (system, _):
        request = message(1, PROMPT, max_tokens=40)
        run_until_idle(system, request)
        assert system.detokenizer.tokens[request.handle] == output_of(40)
        assert system.scheduler.num_steps == 40


def test_nobody_else_loses_the_overlap_once_the_row_is_gone() -> None:
    with guessing(4, depth=2) as (system, _):
        system.inbox.send(message(1, PROMPT, max_tokens=4))
        system.inbox.send(message(2, [5] * 6, max_tokens=40))
        for _ in range(10):
            system.step()
        assert system.rows.num_running == 1
        assert system.rows.in_flight.max() == 1
        assert not system.rows.must_commit_first


def test_pages_of_rejected_guesses_are_given_back_at_once() -> None:
    with guessing(9, wrong=1, depth=2) as (system, _):
        system.inbox.send(message(1, PROMPT, max_tokens=20))
        for _ in range(15):
            system.step()
            for req in system.rows.running_requests():
                if not req.num_in_flight:
                    assert system.kv.num_pages.item(req.row) == system.kv.num_pages_for(req.num_tokens)


def test_guesses_are_cut_to_the_pages_that_there_are_before_anybody_gives_way() -> None:
    """16 pages of 4: two requests of 32 tokens each fill them, and neither is taken back for a guess."""
    with guessing(9, wrong=1, num_pages=16, depth=1, max_len=64, cache="none") as (system, _):
        requests = [message(1, PROMPT, max_tokens=28), message(2, [5] * 4, max_tokens=28)]
        run_until_idle(system, *requests)
        assert system.lifecycle.num_retracted == 0
        assert all(system.detokenizer.closed[r.handle].reason == "length" for r in requests)


def test_guesses_leave_a_token_to_each_row() -> None:
    with guessing(9, wrong=1, budget=4, depth=1) as (system, _):
        requests = [message(1, PROMPT, max_tokens=20), message(2, PROMPT, max_tokens=20)]
        for item in requests:
            system.inbox.send(item)
        for _ in range(10):
            system.step()
        before = [len(system.detokenizer.tokens[r.handle]) for r in requests]
        system.step()
        after = [len(system.detokenizer.tokens[r.handle]) for r in requests]
        assert all(new > old for old, new in zip(before, after, strict=True))
