"""Steps for a pipeline of stages: every stage has one to compute, in a model of time and of the rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from runtime.wire.format import unpack_ids
from runtime.wire.plan import BatchPlan
from tests.harness.scheduler.scheduler_parts import message, run_until_idle, running
from tests.harness.scheduler.virtual_pipe import VirtualPipe
from tests.harness.simulation.sim_system import System

NUM_STEPS = 200


def piped(
    system: System, num_stages: int, spread: float, work: Callable[[BatchPlan], float] | None = None
) -> VirtualPipe:
    system.executor.__class__ = type("WatchedPipe", (type(system.executor), VirtualPipe), {})
    pipe: VirtualPipe = system.executor  # type: ignore[assignment]
    return pipe.begin(num_stages, spread, work=work)


def rows_per_time(num_stages: int, num_rows: int, spread: float) -> float:
    """Tokens of `num_rows` that decode, in the time of one stage of one step."""
    room = {"num_pages": 1000 * num_rows, "max_rows": num_rows, "max_len": 1000}
    with running(num_stages=num_stages, depth=2, **room) as system:
        pipe = piped(system, num_stages, spread)
        for number in range(num_rows):
            system.inbox.send(message(number, [number + 1] * 4, max_tokens=900))
        while pipe.now < 40:
            system.step()
        began, num_before = pipe.now, sum(map(len, system.detokenizer.tokens.values()))
        while system.scheduler.num_committed < NUM_STEPS:
            system.step()
        num_tokens = sum(map(len, system.detokenizer.tokens.values())) - num_before
        return num_tokens / (pipe.now - began)


@pytest.mark.parametrize(
    ("num_stages", "least"), [(2, 0.93), pytest.param(3, 0.91, marks=pytest.mark.full), (4, 0.90)]
)
def test_stages_whose_times_vary_by_a_fifth_are_hardly_ever_idle(num_stages: int, least: float) -> None:
    """Ideal: in each stage's time a P-th of the rows has its token. With two stages no schedule gets beyond
    0.9375: a row's next step waits for the later one of two that are computed at a time.
    """
    num_rows = 2 * num_stages
    assert rows_per_time(num_stages, num_rows, 0.2) >= least * num_rows / num_stages


@pytest.mark.parametrize("num_stages", [pytest.param(2, marks=pytest.mark.full), 4])
def test_one_row_takes_turns_with_nobody(num_stages: int) -> None:
    """It has a token each time that the pipeline takes, and one step planned ahead."""
    assert rows_per_time(num_stages, 1, 0.0) == pytest.approx(1 / num_stages, rel=0.02)


@pytest.mark.parametrize("num_stages", [2, 4])
def test_chunks_of_one_prompt_follow_each_other_through_the_stages(num_stages: int) -> None:
    num_chunks = 60
    room = {"num_pages": 400, "max_len": 1000, "budget": 16}
    with running(num_stages=num_stages, depth=2, **room) as system:
        pipe = piped(system, num_stages, 0.0)
        request = message(1, [7 + i % 80 for i in range(16 * num_chunks)], max_tokens=1)
        system.inbox.send(request)
        while request.handle not in system.detokenizer.closed:
            system.step()
        assert pipe.now == pytest.approx(num_chunks + num_stages - 1)


@pytest.mark.parametrize(("num_stages", "gain"), [pytest.param(1, 0.0, marks=pytest.mark.full), (4, 0.06)])
def test_later_chunks_that_have_fewer_tokens_keep_no_stage_waiting(num_stages: int, gain: float) -> None:
    """At the end of the prompt a token takes four times as long as at its beginning. Behind the last chunk
    only the other stages compute, and a whole one is four times as long as a short one.
    """
    span, budget, num_chunks = 850, 64, 40
    ends, times = [], []

    def work(plan: BatchPlan) -> float:
        start, num_new = unpack_ids(plan.starts).item(0), len(unpack_ids(plan.input_ids))
        times.append((num_new + (start * num_new + num_new**2 / 2) / span) / (budget + budget**2 / 2 / span))
        return times[-1]

    for attention_span in (0, span):
        room = {"num_pages": 4000, "page_size": 1, "max_len": 4000, "budget": budget}
        with running(num_stages=num_stages, depth=2, attention_span=attention_span, **room) as system:
            pipe = piped(system, num_stages, 0.0, work)
            times.clear()
            request = message(1, [7 + i % 80 for i in range(budget * num_chunks)], max_tokens=1)
            system.inbox.send(request)
            while request.handle not in system.detokenizer.closed:
                system.step()
            ends.append(pipe.now)
    assert max(times) < 1.0001
    assert min(times[:-1]) > 0.9
    assert ends[1] < ends[0] * (1.0001 - gain)


def test_rows_that_came_together_are_shared_out() -> None:
    with running(num_stages=4, depth=2, max_rows=8, num_pages=400) as system:
        pipe = piped(system, 4, 0.0)
        for number in range(8):
            system.inbox.send(message(number, [number + 1] * 4, max_tokens=80))
        sizes: list[int] = []
        watch = system.executor.watch

        def note(plan: BatchPlan) -> None:
            sizes.append(plan.num_decodes)
            watch(plan)

        system.executor.watch = note
        while pipe.now < 60:
            system.step()
        assert set(sizes[-20:]) == {2}


def test_a_step_of_nothing_commits_the_oldest_alone() -> None:
    """A row of two has ended: its stage goes on with the other's step."""
    with running(num_stages=4, depth=2) as system:
        piped(system, 4, 0.0)
        for number in range(3):
            system.inbox.send(message(number, [number + 1] * 4, max_tokens=8))
        committed: list[int] = []
        while not system.scheduler.is_idle or not committed:
            before = system.scheduler.num_committed
            system.step()
            committed.append(system.scheduler.num_committed - before)
        assert max(committed) == 1


@pytest.mark.parametrize("num_rows", [2, 5])
def test_rows_that_lack_pages_keep_no_other_from_going_on(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only those of the last request may grow; the others have waited for longer each time."""
    room = {"num_pages": 100, "max_rows": num_rows, "capacity": "guaranteed_no_evict"}
    with running(num_stages=2, depth=2, **room) as system:
        requests = [message(number, [number + 1] * 4, max_tokens=12) for number in range(num_rows)]
        for each in requests:
            system.inbox.send(each)
        while any(len(system.detokenizer.tokens.get(each.handle, ())) < 2 for each in requests):
            system.step()
        *_, last = system.rows.running_requests()
        with monkeypatch.context() as patch:
            patch.setattr(system.scheduler.capacity, "may_grow", lambda rows, upto: np.all(rows == last.row))
            for _ in range(40 * num_rows):
                if not system.detokenizer.closed:
                    system.step()
            assert list(system.detokenizer.closed) == [last.handle]
        run_until_idle(system)
        assert len(system.detokenizer.closed) == num_rows


def test_rows_that_sit_out_do_not_make_the_shares_of_others_larger() -> None:
    with running(num_stages=2, depth=2, max_rows=8, num_pages=400) as system:
        pipe = piped(system, 2, 0.0)
        for number in range(8):
            system.inbox.send(message(number, [number + 1] * 4, max_tokens=80))
            if number == 3:
                while pipe.now < 10:
                    system.step()
                for row in system.rows.running.tolist():
                    system.rows.sit_out(row)
        sizes: list[int] = []
        watch = system.executor.watch

        def note(plan: BatchPlan) -> None:
            sizes.append(plan.num_decodes)
            watch(plan)

        system.executor.watch = note
        while pipe.now < 60:
            system.step()
        assert set(sizes[-20:]) == {2}
        for row in system.rows.running.tolist():
            system.rows.join_again(row)
        run_until_idle(system)
