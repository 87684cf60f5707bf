"""RequestPerfMetrics: exact times and pages, from the scheduler to the output that a caller holds."""

from __future__ import annotations

from typing import get_args

import pytest

from detokenizer_proc.text_stream import TextStream
from runtime.wire.handle import make_handle
from runtime.wire.messages import AbortRequest, Closed, CloseReason, StreamOpen
from runtime.wire.perf_metrics import KvCacheMetrics, RequestPerfMetrics, TimingMetrics
from tests.harness.scheduler.scheduler_parts import message, run_until_idle, running
from tests.harness.simulation.sim_system import STEP_S, System

LONG = list(range(40))
ASKING = {"return_perf_metrics": True}


def metrics_of(system: System, number: int) -> RequestPerfMetrics:
    found = system.detokenizer.closed[make_handle(1, number)].perf_metrics
    assert found is not None
    return found


def test_times_and_steps_of_a_request_that_waits_for_its_row() -> None:
    with running(budget=16, max_rows=1) as system:
        first = message(1, [3, 4], max_tokens=2)
        second = message(2, LONG, max_tokens=3, sampling=ASKING, arrived_s=0.7)
        run_until_idle(system, first, second)
        metrics = metrics_of(system, 2)
        assert system.detokenizer.closed[first.handle].perf_metrics is None
    # The clock is at 1.0 and moves on with each step. Steps 1 and 2 are the first request's; 3, 4 and 5 are
    # chunks of 16, 16 and 8 tokens, the last of which gives the first of three tokens.
    assert metrics.timing_metrics.arrival_time == 0.7
    times = metrics.timing_metrics
    assert times.first_scheduled_time == pytest.approx(1.0 + 3 * STEP_S)
    assert times.first_token_time == pytest.approx(1.0 + 5 * STEP_S)
    assert times.last_token_time == pytest.approx(1.0 + 7 * STEP_S)
    assert (metrics.first_iter, metrics.last_iter) == (5, 7)
    assert metrics.kv_cache_metrics == KvCacheMetrics(11, 11, 0, 10)


def test_a_token_counts_when_its_step_has_ended() -> None:
    with running(depth=2) as system:
        run_until_idle(system, message(1, [3], max_tokens=2, sampling=ASKING))
        times, iterations = metrics_of(system, 1).timing_metrics, metrics_of(system, 1)
    assert times.first_scheduled_time == pytest.approx(1.0 + STEP_S)
    assert times.first_token_time == pytest.approx(1.0 + 2 * STEP_S)
    assert times.last_token_time == pytest.approx(1.0 + 3 * STEP_S)
    assert (iterations.first_iter, iterations.last_iter) == (1, 2)


def test_pages_that_were_in_the_cache() -> None:
    with running() as system:
        run_until_idle(system, message(1, LONG, max_tokens=1))
        run_until_idle(system, message(2, [*LONG, 80], max_tokens=1, sampling=ASKING))
        pages = metrics_of(system, 2).kv_cache_metrics
    assert pages == KvCacheMetrics(
        num_total_allocated_blocks=11,
        num_new_allocated_blocks=1,
        num_reused_blocks=10,
        num_missed_blocks=1,
    )
    assert pages.kv_cache_hit_rate == 10 / 11


def test_what_has_not_happened_has_no_time() -> None:
    with running(max_rows=1) as system:
        waiting = message(2, LONG, sampling=ASKING)
        assert system.inbox.send(message(1, [3], max_tokens=20))
        assert system.inbox.send(waiting)
        system.step()
        run_until_idle(system, AbortRequest((waiting.handle,)))
        metrics = metrics_of(system, 2)
    assert metrics == RequestPerfMetrics(TimingMetrics(1.0 + STEP_S), KvCacheMetrics(0, 0, 0, 0))
    assert metrics.kv_cache_metrics.kv_cache_hit_rate == 0.0


def test_a_retracted_request_keeps_the_times_of_its_first_stay() -> None:
    with running(num_pages=16, conservativeness=0.05) as system:
        run_until_idle(system, *[message(i, [i] * 8, max_tokens=30, sampling=ASKING) for i in range(3)])
        assert system.lifecycle.num_retracted
        found = [metrics_of(system, number) for number in range(3)]
    starts = [each.timing_metrics.first_scheduled_time for each in found]
    assert starts == pytest.approx([1.0 + STEP_S] * 3)
    firsts = [each.timing_metrics.first_token_time for each in found]
    assert firsts == pytest.approx([1.0 + STEP_S] * 3)
    # Two went on while one waited: their last tokens came at different times.
    lasts = [each.timing_metrics.last_token_time or 0.0 for each in found]
    assert max(lasts) > min(lasts) >= 1.0 + 30 * STEP_S


METRICS = RequestPerfMetrics(TimingMetrics(1.0, 2.0, 3.0, 4.0), KvCacheMetrics(3, 1, 2, 1), 5, 9)


@pytest.mark.parametrize("reason", get_args(CloseReason))
def test_the_detokenizer_passes_them_on_with_every_end(reason: CloseReason) -> None:
    class NoText:
        def push(self, token: int) -> str:
            return ""

        def flush(self) -> str:
            return ""

    stream = TextStream(StreamOpen(make_handle(1, 1), 3), NoText(), lambda ids: "")
    stream.close(Closed(make_handle(1, 1), reason, perf_metrics=METRICS), frozenset())
    assert stream.finish is not None
    assert stream.finish.perf_metrics == METRICS
