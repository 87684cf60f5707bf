"""The step loop: what is launched when, what is shared, and who gives way."""

from __future__ import annotations

import pytest

from runtime.base.errors import ExecutorError
from runtime.wire.format import Message
from runtime.wire.messages import AbortRequest, ErrorInfo
from tests.harness.scheduler.scheduler_parts import message, run_until_idle, running
from tests.harness.simulation.sim_system import System

LONG = [i % 90 for i in range(40)]


def start(system: System, *messages: Message) -> None:
    for item in messages:
        assert system.inbox.send(item)
    system.step()


def num_rows(system: System) -> int:
    return system.rows.num_running


# -- admission and sharing ---------------------------------------------------------------------------------


def test_of_equal_prompts_in_one_step_one_is_computed() -> None:
    with running(budget=256) as system:
        requests = [message(i, LONG, max_tokens=6) for i in range(3)]
        start(system, *requests)
        assert num_rows(system) == 1
        run_until_idle(system)
        assert system.executor.num_computed < 2 * len(LONG)
        assert {system.detokenizer.closed[r.handle].cached_tokens for r in requests} == {0, 36}


def test_a_request_behind_one_that_waits_for_a_page_is_still_considered() -> None:
    with running(budget=256) as system:
        start(system, message(1, LONG), message(2, LONG), message(3, [7] * 9))
        assert [req.seq for req in system.rows.running_requests()] == [1, 3]


def test_a_waiting_request_uses_the_pages_of_a_chunk_once_its_plan_is_launched() -> None:
    with running(budget=16) as system:
        start(system, message(1, LONG))
        start(system, message(2, [*LONG[:16], 80]))
        start(system)
        second = next(req for req in system.rows.running_requests() if req.seq == 2)
        assert second.cached_tokens == 16


def test_who_waits_for_a_page_goes_on_when_its_maker_is_gone() -> None:
    with running(budget=16) as system:
        first, second = message(1, LONG), message(2, LONG)
        start(system, first, second)
        assert num_rows(system) == 1
        run_until_idle(system, AbortRequest((first.handle,)))
        assert system.detokenizer.closed[second.handle].reason == "length"


def test_without_a_cache_nobody_waits_for_anybody() -> None:
    with running(cache="none", budget=256) as system:
        start(system, message(1, LONG), message(2, LONG))
        assert num_rows(system) == 2
        run_until_idle(system)


def test_decoding_rows_get_their_token_in_every_step_of_a_long_prefill() -> None:
    with running(budget=8) as system:
        first = message(1, [5] * 4, max_tokens=20)
        start(system, first)
        system.inbox.send(message(2, LONG))
        for step in range(1, 6):
            system.step()
            assert len(system.detokenizer.tokens[first.handle]) == step + 1
        run_until_idle(system)


def test_higher_priority_is_admitted_first() -> None:
    with running(max_rows=1) as system:
        start(system, message(1, [1] * 5), message(2, [2] * 5), message(3, [3] * 5, priority=5))
        run_until_idle(system)
        assert [handle[8] for handle in system.detokenizer.closed] == [3, 1, 2]


# -- short of pages ----------------------------------------------------------------------------------------


def test_a_retracted_request_ends_with_the_output_it_would_have_had() -> None:
    requests = [message(i, [i + 1] * 10, max_tokens=30) for i in range(3)]
    outputs = []
    for num_pages in (64, 14):
        with running(num_pages=num_pages, conservativeness=0.01, max_len=56) as system:
            run_until_idle(system, *requests)
            assert (system.lifecycle.num_retracted > 0) == (num_pages == 14)
            outputs.append([system.detokenizer.tokens[r.handle] for r in requests])
            assert all(c.cached_tokens == 0 for c in system.detokenizer.closed.values())
    assert outputs[0] == outputs[1]


def test_the_lowest_priority_gives_way() -> None:
    with running(num_pages=12, conservativeness=0.01, max_len=48) as system:
        low, high = message(1, [1] * 10, max_tokens=30), message(2, [2] * 10, max_tokens=30, priority=1)
        start(system, low)
        start(system, high)
        assert num_rows(system) == 2
        run_until_idle(system)
        assert system.lifecycle.num_retracted == 1
        assert list(system.detokenizer.closed) == [high.handle, low.handle]


def test_a_request_that_fills_the_pool_alone_is_served() -> None:
    with running(num_pages=10, max_len=40) as system:
        run_until_idle(system, message(1, [1] * 10, max_tokens=500), message(2, [2] * 30, max_tokens=500))
        assert {closed.reason for closed in system.detokenizer.closed.values()} == {"length"}


def test_a_request_that_cannot_fit_even_alone_fails_alone() -> None:
    with running(num_pages=8, max_len=64) as system:  # columns longer than the pool: a mistake in the set-up
        big, small = message(1, [1] * 10, max_tokens=50), message(2, [2] * 5, max_tokens=5)
        run_until_idle(system, big, small)
        closed = system.detokenizer.closed[big.handle]
        assert closed.error is not None
        assert closed.error.code == "kv_cache_exhausted"
        assert system.detokenizer.closed[small.handle].reason == "length"


# -- the end of a sequence ---------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_length_finish_is_predicted_and_computes_nothing_more(depth: int) -> None:
    with running(depth=depth) as system:
        run_until_idle(system, message(1, [1] * 10, max_tokens=6))
        assert system.executor.num_computed == 10 + 5


def test_a_stop_id_below_min_tokens_does_not_stop() -> None:
    with running() as system:
        plain = message(1, [1] * 10, max_tokens=10)
        run_until_idle(system, plain)
        output = system.detokenizer.tokens[plain.handle]
        stopping = message(2, [1] * 10, max_tokens=10, sampling={"stop_token_ids": (output[2],)})
        masked = message(
            3, [1] * 10, max_tokens=10, sampling={"stop_token_ids": (output[2],), "min_tokens": 5}
        )
        run_until_idle(system, stopping, masked)
        closed = system.detokenizer.closed
        assert system.detokenizer.tokens[stopping.handle] == output[: output.index(output[2]) + 1]
        assert closed[stopping.handle].stop_token == output[2]
        assert len(system.detokenizer.tokens[masked.handle]) > 5


def test_a_row_has_the_stop_ids_of_who_holds_it() -> None:
    with running(max_rows=1) as system:
        plain = [message(i, [1] * 10, max_tokens=10) for i in range(3)]
        run_until_idle(system, plain[0])
        output = system.detokenizer.tokens[plain[0].handle]
        stopping = [
            message(i, [1] * 10, max_tokens=10, sampling={"stop_token_ids": (output[i],)}) for i in (3, 4, 5)
        ]
        run_until_idle(system, stopping[0], plain[1], stopping[1], stopping[2], plain[2])
        lens = [len(system.detokenizer.tokens[each.handle]) for each in [*plain, *stopping]]
        assert lens == [10, 10, 10, *(output.index(output[i]) + 1 for i in (3, 4, 5))]


@pytest.mark.parametrize("num_stop_ids", [1, 4, 5, 60])
def test_any_number_of_stop_ids_stops(num_stop_ids: int) -> None:
    with running() as system:
        stop_ids = tuple(range(num_stop_ids))
        request = message(1, [1] * 10, max_tokens=80, sampling={"stop_token_ids": stop_ids})
        run_until_idle(system, request)
        output = system.detokenizer.tokens[request.handle]
        closed = system.detokenizer.closed[request.handle]
        assert not set(output[:-1]) & set(stop_ids)
        assert (closed.reason == "stop") == (output[-1] in stop_ids)


# -- the far end and the worker ----------------------------------------------------------------------------


def test_while_output_is_refused_nothing_is_launched_and_aborts_are_applied() -> None:
    with running(depth=2) as system:
        requests = [message(i, [i + 1] * 8, max_tokens=20) for i in range(3)]
        start(system, *requests)
        is_refusing = True
        system.outbox.refuses = lambda: is_refusing
        system.step()
        system.step()
        num_computed = system.executor.num_computed
        for request in requests[:2]:
            system.inbox.send(AbortRequest((request.handle,)))
        for _ in range(5):
            system.step()
        assert system.executor.num_computed == num_computed
        assert num_rows(system) == 1
        assert not system.scheduler.in_flight
        is_refusing = False
        run_until_idle(system)
        assert sorted(c.reason for c in system.detokenizer.closed.values()) == ["abort", "abort", "length"]
        system.check_empty()


def test_a_worker_that_fails_ends_no_request_by_itself() -> None:
    with running(depth=2, max_rows=2) as system:
        requests = [message(i, [i + 1] * 8, max_tokens=20) for i in range(4)]
        system.executor.fails_at_step = 4
        for request in requests:
            system.inbox.send(request)
        for _ in range(system.executor.fails_at_step):
            system.step()
        with pytest.raises(ExecutorError):
            system.step()
        system.deliver()
        assert not system.detokenizer.closed
        assert len(system.scheduler.lifecycle.requests) == 4
        system.scheduler.fail_all(ErrorInfo("it has failed", "worker_failed", None, 503))
        system.deliver()
        assert len(system.detokenizer.closed) == 4
        for closed in system.detokenizer.closed.values():
            assert closed.error is not None
            assert (closed.error.code, closed.error.status) == ("worker_failed", 503)
        system.check_empty()


def test_shutting_down_closes_what_lives() -> None:
    with running() as system:
        start(system, message(1, [1] * 8), message(2, [2] * 8))
        system.scheduler.fail_all(ErrorInfo("bye", "shutting_down", None, 503))
        system.deliver()
        system.check_empty()
