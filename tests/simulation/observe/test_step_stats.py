"""Iteration and request statistics: each figure is moved by a workload made for it, to an exact value."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest

from runtime.wire.handle import make_handle
from runtime.wire.messages import AbortRequest, ControlRequest
from runtime.wire.stats import (
    TIMESTAMP_FORMAT,
    IterationStats,
    IterationStatsPage,
    RequestStats,
    RequestStatsPage,
    batch_manager_record,
)
from scheduler_proc.observe import request_records
from scheduler_proc.observe.stats_questions import MAX_RECORDS, MAX_WAITING
from tests.harness.scheduler.scheduler_parts import message, run_until_idle, running
from tests.harness.simulation.sim_system import STEP_S, WALL_S, System

LONG = list(range(40))


def records(system: System) -> list[IterationStats]:
    """All that are kept; each is checked for what holds of every one."""
    found: list[IterationStats] = []
    while found[-1:] == [] or found[-1].iter < system.stats.iterations_after(0, 1).newest:
        page = system.stats.iterations_after(found[-1].iter if found else 0, 7)
        if not page.records:
            break
        found.extend(page.records)
    for stats in found:
        kv = stats.kv_cache_stats
        assert kv.free_num_blocks + kv.used_num_blocks == kv.max_num_blocks == system.kv.pages.num_pages
        assert kv.alloc_total_blocks == kv.alloc_new_blocks + kv.reused_blocks
        for name, value in msgspec.to_builtins(stats).items():
            assert not isinstance(value, int | float) or value >= 0, name
        inflight = stats.inflight_batching_stats
        if inflight is not None:
            assert inflight.num_scheduled_requests == (
                inflight.num_context_requests + inflight.num_gen_requests
            )
    return found


def inflight(found: list[IterationStats], field: str) -> list[Any]:
    return [getattr(each.inflight_batching_stats, field) for each in found]


def column(found: list[IterationStats], field: str) -> list[Any]:
    return [getattr(each, field) for each in found]


def ask(system: System, op: Any, *, number: int = 1, client: int = 9, **fields: Any) -> None:
    assert system.inbox.send(ControlRequest(client, number, op, **fields))


def replies(system: System) -> dict[int, Any]:
    return {reply.number: msgspec.msgpack.decode(reply.body) for reply in system.detokenizer.replies}


# -- one iteration -----------------------------------------------------------------------------------------


def test_one_request_from_its_chunks_to_its_end() -> None:
    with running(budget=16) as system:
        run_until_idle(system, message(1, LONG, max_tokens=3))
        found = records(system)
    # 40 tokens in chunks of 16, 16 and 8, the last of which samples the first of three tokens.
    assert column(found, "iter") == [1, 2, 3, 4, 5]
    assert inflight(found, "num_ctx_tokens") == [16, 16, 8, 0, 0]
    assert inflight(found, "num_context_requests") == [1, 1, 1, 0, 0]
    assert inflight(found, "num_gen_requests") == [0, 0, 0, 1, 1]
    assert inflight(found, "avg_num_decoded_tokens_per_iter") == [0.0, 0.0, 1.0, 1.0, 1.0]
    assert inflight(found, "micro_batch_id") == [0] * 5
    assert column(found, "num_new_active_requests") == [1, 0, 0, 0, 0]
    assert column(found, "num_active_requests") == [1, 1, 1, 1, 0]
    assert column(found, "num_completed_requests") == [0, 0, 0, 0, 1]
    used = [each.kv_cache_stats.used_num_blocks for each in found]
    with running(budget=16, num_stages=2) as system:
        run_until_idle(system, message(1, LONG, max_tokens=3))
        assert inflight(records(system), "micro_batch_id") == [0, 1, 0, 1, 0]
    assert used == [4, 8, 10, 11, 0]  # pages of 4 tokens; the third output token is never computed
    assert found[-1].kv_cache_stats.alloc_new_blocks == 11
    assert found[-1].static_batching_stats is None


def test_limits_and_times() -> None:
    with running(max_requests=3) as system:
        run_until_idle(system, message(1, [1, 2, 3], max_tokens=3, arrived_s=0.76))
        found = records(system)
    first = found[0]
    assert first.max_num_active_requests == first.max_batch_size_static == 4
    assert first.max_batch_size_runtime == 3
    assert first.max_num_tokens_static == first.max_num_tokens_runtime == 64
    assert first.max_batch_size_tuner_recommended == first.max_num_tokens_tuner_recommended == 0
    assert time.mktime(time.strptime(first.timestamp, TIMESTAMP_FORMAT)) == WALL_S
    # It arrived at 0.76 and was admitted in the first step, at 1.0 + STEP_S.
    assert first.new_active_requests_queue_latency_ms == pytest.approx((0.24 + STEP_S) * 1e3)
    assert found[1].new_active_requests_queue_latency_ms == 0.0
    # The clock stands still within a step of depth 1; the record after it was launched when it was committed.
    assert column(found, "iter_latency_ms") == [0.0] * 3
    assert first.cpu_mem_usage > 1 << 20
    assert first.gpu_mem_usage == first.pinned_mem_usage == 0


def test_the_latency_of_a_step_runs_from_the_end_of_the_one_before() -> None:
    with running(depth=2) as system:
        run_until_idle(system, message(1, [1, 2, 3], max_tokens=4))
        latencies = column(records(system), "iter_latency_ms")
    # Each is committed one step of the clock after its launch, and after its predecessor.
    assert latencies == pytest.approx([STEP_S * 1e3] * len(latencies))


def test_the_queue_and_the_rows() -> None:
    with running(max_rows=4) as system:
        run_until_idle(system, *[message(i, [i, 1, 2], max_tokens=3) for i in range(10)])
        found = records(system)
    assert column(found, "num_queued_requests")[:3] == [6, 6, 6]
    assert column(found, "num_active_requests")[:3] == [4, 4, 0]
    assert inflight(found, "num_scheduled_requests")[:3] == [4, 4, 4]
    assert sum(column(found, "num_new_active_requests")) == 10
    assert sum(column(found, "num_completed_requests")) == 10


def test_an_abort_is_completed_too() -> None:
    with running(max_rows=1) as system:
        first, second = message(1, [1, 2], max_tokens=4), message(2, [3, 4])
        for item in (first, second):
            assert system.inbox.send(item)
        system.step()
        run_until_idle(system, AbortRequest((second.handle,)))
        assert sum(column(records(system), "num_completed_requests")) == 2


def test_reuse_of_a_prompt() -> None:
    with running() as system:
        run_until_idle(system, message(1, LONG, max_tokens=1))
        run_until_idle(system, message(2, [*LONG, 80, 81], max_tokens=1))
        first, second = records(system)
    assert first.kv_cache_stats.reused_blocks == 0
    assert first.kv_cache_stats.missed_blocks == 10
    # All ten full pages are found; the eleventh has the two new tokens.
    assert second.kv_cache_stats.reused_blocks == 10
    assert second.kv_cache_stats.missed_blocks == 11
    assert second.kv_cache_stats.alloc_new_blocks == 11
    assert second.kv_cache_stats.cache_hit_rate == 10 / 21
    assert inflight([first, second], "num_ctx_tokens") == [40, 2]
    assert column([first, second], "cross_kv_cache_stats") == [None, None]


@pytest.mark.parametrize("budget", [7, 64])
@pytest.mark.parametrize("num_pages", [24, 64])
def test_context_tokens_are_prompt_less_cached(budget: int, num_pages: int) -> None:
    """With chunks, cache hits and, in the small pool, requests that are paused and resumed."""
    prompts = [[i] * 9 + LONG[: 8 + i] for i in range(4)]
    with running(budget=budget, num_pages=num_pages, conservativeness=0.05, depth=2) as system:
        messages = [message(i, prompt, max_tokens=24) for i, prompt in enumerate(prompts)]
        run_until_idle(system, *messages)
        again = message(9, prompts[3], max_tokens=2)
        run_until_idle(system, again)
        found = records(system)
        retracted = system.lifecycle.num_retracted
        closed = system.detokenizer.closed
    cached = sum(each.cached_tokens for each in closed.values())
    computed = sum(inflight(found, "num_ctx_tokens")) - sum(inflight(found, "num_recomputed_ctx_tokens"))
    assert (retracted > 0) is (num_pages == 24)
    assert cached > 0
    assert computed == sum(map(len, prompts)) + len(prompts[3]) - cached
    assert (sum(inflight(found, "num_recomputed_ctx_tokens")) > 0) is (retracted > 0)
    assert (max(inflight(found, "num_paused_requests")) > 0) is (retracted > 0)
    assert inflight(found, "num_paused_requests")[-1] == 0
    assert all(each.num_active_requests + each.num_queued_requests <= 4 for each in found)


def test_a_static_batch_reports_once_and_counts_its_empty_slots() -> None:
    with running(batching="static", capacity="static_batch") as system:
        run_until_idle(system, *[message(i, [i, 5, 6], max_tokens=n) for i, n in enumerate((2, 5, 9))])
        run_until_idle(system, message(9, LONG, max_tokens=1))
        found = records(system)
    assert inflight_of(found) == [None] * len(found)
    first, second = [each.static_batching_stats for each in found if each.static_batching_stats is not None]
    assert first.num_scheduled_requests == first.num_context_requests == 3
    assert first.num_ctx_tokens == 9
    assert first.num_gen_tokens == 2 + 5 + 9
    assert first.empty_gen_slots == (9 - 2) + (9 - 5)
    assert (second.num_ctx_tokens, second.num_gen_tokens, second.empty_gen_slots) == (40, 1, 0)
    record = batch_manager_record(found[-1])
    assert record["Total Generation Tokens"] == 1
    assert record["Empty Generation Slots"] == 0
    assert "MicroBatch ID" not in record


def inflight_of(found: list[IterationStats]) -> list[Any]:
    return [each.inflight_batching_stats for each in found]


def test_hits_and_input_of_a_prefill_batch_are_its_prompts() -> None:
    with running() as system:
        run_until_idle(system, message(1, LONG, max_tokens=1))
        assert system.inbox.send(message(2, [*LONG, 7], max_tokens=1))
        assert system.inbox.send(message(3, [9, 9, 9], max_tokens=1))
        for each in system.inbox.drain():
            system.scheduler.intake.receive(each)
        _, totals = system.scheduler.builder.build(True)
        assert totals.num_cached_tokens + totals.num_new_tokens == 41 + 3
        assert (totals.num_cached_tokens, totals.num_prefills) == (40, 2)


# -- the ring ----------------------------------------------------------------------------------------------


def test_the_ring_keeps_the_last_and_counts_what_is_gone() -> None:
    with running(max_iterations=4) as system:
        run_until_idle(system, message(1, [1], max_tokens=10))
        page = system.stats.iterations_after(3, 2)
    assert [each.iter for each in page.records] == [7, 8]
    assert (page.num_dropped, page.newest) == (3, 10)
    assert system.stats.iterations_after(10, 2) == IterationStatsPage((), 0, 10)


def test_a_record_as_json_has_the_names_of_the_executor_and_of_the_batch_manager() -> None:
    with running() as system:
        run_until_idle(system, message(1, LONG, max_tokens=1))
        (stats,) = records(system)
    names = json.loads(msgspec.json.encode(stats))
    assert {"timestamp", "iter", "iterLatencyMS", "newActiveRequestsQueueLatencyMS"} <= names.keys()
    assert {"maxBatchSizeTunerRecommended", "gpuMemUsage", "specDecStats"} <= names.keys()
    assert {"maxNumBlocks", "freeNumBlocks", "usedNumBlocks", "tokensPerBlock"} <= names[
        "kvCacheStats"
    ].keys()
    assert {"numScheduledRequests", "microBatchId"} <= names["inflightBatchingStats"].keys()
    record = json.loads(json.dumps(batch_manager_record(stats)))
    assert record == {
        "Timestamp": stats.timestamp,
        "Iteration Counter": 1,
        "Active Request Count": 0,
        "Max Request Count": 4,
        "Max KV cache blocks": 64,
        "Free KV cache blocks": 64,
        "Used KV cache blocks": 0,
        "Tokens per KV cache block": 4,
        "Scheduled Requests": 1,
        "Context Requests": 1,
        "Generation Requests": 0,
        "Total Context Tokens": 40,
        "MicroBatch ID": 0,
    }


# -- one request -------------------------------------------------------------------------------------------


def test_a_request_goes_through_its_stages() -> None:
    with running(budget=16, max_rows=1, max_request_iterations=100) as system:
        run_until_idle(system, message(1, [3], max_tokens=1), message(2, LONG, max_tokens=2), max_steps=50)
        page = system.stats.requests_after(0, 100, (1,))
    second = [each for record in page.records for each in record.request_stats if each.id == 2]
    assert [each.stage for each in second] == [
        "QUEUED",
        "CONTEXT_IN_PROGRESS",
        "CONTEXT_IN_PROGRESS",
        "GENERATION_IN_PROGRESS",
        "GENERATION_COMPLETE",
    ]
    assert [each.context_prefill_position for each in second] == [0, 16, 32, 40, 40]
    assert [each.num_generated_tokens for each in second] == [0, 0, 0, 1, 2]
    assert [each.alloc_total_blocks_per_request for each in second] == [0, 4, 8, 10, 11]
    assert [each.scheduled for each in second] == [False, True, True, True, True]
    assert [each.avg_num_decoded_tokens_per_iter for each in second] == [0.0, 0.0, 0.0, 1.0, 1.0]
    assert {each.request_id for each in second} == {3}
    assert [each.missed_blocks_per_request for each in second] == [0, 10, 10, 10, 10]


def test_reuse_of_one_request_and_the_ids_of_strangers() -> None:
    with running(max_request_iterations=10) as system:
        run_until_idle(system, message(1, LONG, max_tokens=1))
        run_until_idle(system, message(2, [*LONG, 80], max_tokens=1))
        page = system.stats.requests_after(1, 10, (7,))
    (stats,) = page.records[0].request_stats
    assert stats.request_id is None
    assert (stats.reused_blocks_per_request, stats.missed_blocks_per_request) == (10, 1)
    assert stats.kv_cache_hit_rate_per_request == 10 / 11
    assert stats.alloc_new_blocks_per_request == 1


def test_a_paused_request_says_so() -> None:
    with running(num_pages=16, conservativeness=0.05, max_request_iterations=100) as system:
        run_until_idle(system, *[message(i, [i] * 8, max_tokens=30) for i in range(3)])
        page = system.stats.requests_after(0, 100, ())
        assert system.lifecycle.num_retracted
    paused = [each for record in page.records for each in record.request_stats if each.paused]
    assert paused
    assert {(each.stage, each.scheduled, each.alloc_total_blocks_per_request) for each in paused} == {
        ("QUEUED", False, 0)
    }


def test_of_many_that_end_before_a_step_the_last_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """While generation is paused there is none, and whoever is aborted would be kept for it."""
    monkeypatch.setattr(request_records, "MAX_ENDED", 3)
    with running(max_request_iterations=10) as system:
        ask(system, "pause_generation", mode="in_place")
        requests = [message(number, [number + 1], max_tokens=2) for number in range(6)]
        for each in (*requests, AbortRequest(tuple(each.handle for each in requests[:5]))):
            assert system.inbox.send(each)
        system.step()
        assert len(system.lifecycle.requests) == 1
        run_until_idle(system, ControlRequest(9, 2, "continue_generation"))
        record = system.stats.requests_after(0, 1, (1,)).records[0]
    assert [(each.request_id, each.stage) for each in record.request_stats] == [
        *[(number, "GENERATION_COMPLETE") for number in (3, 4, 5)],
        (6, "GENERATION_IN_PROGRESS"),
    ]


# -- who asks ----------------------------------------------------------------------------------------------


def test_a_question_is_answered_in_pages() -> None:
    with running(max_len=240, num_pages=200) as system:
        run_until_idle(system, message(1, [1], max_tokens=150))
        ask(system, "iteration_stats", number=1)
        ask(system, "iteration_stats", number=2, after=MAX_RECORDS)
        run_until_idle(system)
        first, second = (msgspec.convert(body, IterationStatsPage) for body in replies(system).values())
    assert [each.iter for each in first.records] == list(range(1, MAX_RECORDS + 1))
    assert [each.iter for each in second.records] == list(range(MAX_RECORDS + 1, 151))
    assert first.newest == second.newest == 150


def test_who_waits_is_answered_at_the_next_step_and_once() -> None:
    with running() as system:
        ask(system, "iteration_stats", number=5, wait=True)
        system.step()
        assert not replies(system)
        run_until_idle(system, message(1, [1], max_tokens=3))
        page = msgspec.convert(replies(system)[5], IterationStatsPage)
        assert [each.iter for each in page.records] == [1]
        assert len(system.detokenizer.replies) == 1


def test_questions_are_bounded_and_go_with_their_client() -> None:
    with running() as system:
        questions = system.scheduler.questions
        ask(system, "iteration_stats", number=1, wait=True)
        ask(system, "iteration_stats", number=2, wait=True)
        ask(system, "iteration_stats", number=3, client=10, wait=True)
        system.step()
        assert questions.num_waiting == 3
        assert not replies(system)
        assert system.inbox.send(AbortRequest(client=9))
        system.step()
        assert questions.num_waiting == 1
        for client in range(100, 100 + MAX_WAITING):
            ask(system, "iteration_stats", number=client, client=client, wait=True)
            system.step()
        assert questions.num_waiting == MAX_WAITING
        assert 3 in replies(system)


def test_statistics_that_are_off_are_refused_by_the_name_of_their_setting() -> None:
    with running(max_iterations=0) as system:
        ask(system, "iteration_stats", number=1)
        ask(system, "request_stats", number=2, wait=True)
        run_until_idle(system, message(1, [1]))
        assert not any(reply.ok for reply in system.detokenizer.replies)
        names = [body[2] for body in replies(system).values()]
        assert names == ["iter_stats_max_iterations"] * 2
        assert system.stats.num_iterations == 0
    with running() as system:
        ask(system, "request_stats", number=1)
        run_until_idle(system, message(1, [1]))
        assert replies(system)[1][2] == "request_stats_max_iterations"


def test_the_wire_names_only_the_askers_own_requests() -> None:
    with running(max_request_iterations=4) as system:
        run_until_idle(system, message(7, [1, 2], max_tokens=1))
        ask(system, "request_stats", number=1, own=(1,))
        ask(system, "request_stats", number=2, own=(2,))
        run_until_idle(system)
        pages = [msgspec.convert(body, RequestStatsPage) for body in replies(system).values()]
    found: list[RequestStats] = [page.records[0].request_stats[0] for page in pages]
    assert [each.request_id for each in found] == [8, None]
    assert make_handle(1, 7) not in msgspec.msgpack.encode(pages)
