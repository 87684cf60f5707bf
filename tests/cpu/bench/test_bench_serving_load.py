"""The load: when conversations begin, how many run together, what a failure does; and the figures."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from bench_serving.backends.base import BenchPrompt, ChatTurn
from bench_serving.datasets.base import LoadConversation, Turn
from bench_serving.load import LoadResult, Traffic, arrival_times, as_messages, as_text, run_load
from bench_serving.metrics import LoadMetrics, compute_metrics, throughput_series
from bench_serving.records import RequestRecord
from carousel.http_client import RequestFailure

AT_ONCE = Traffic(math.inf, None, seed=1)


class FakeBackend:
    """Answers "." for each asked token, and fails prompts that end in "fail"."""

    def __init__(self) -> None:
        self.prompts: list[BenchPrompt] = []
        self.num_in_flight = 0
        self.most_in_flight = 0

    async def generate(self, prompt: BenchPrompt, output_len: int, record: RequestRecord) -> None:
        self.prompts.append([*prompt] if isinstance(prompt, list) else prompt)
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        for _ in range(3):
            await asyncio.sleep(0)
        self.num_in_flight -= 1
        if isinstance(prompt, str) and prompt.endswith("fail"):
            raise RequestFailure("as asked")
        for now in range(output_len):
            record.add_chunk(float(now + 1), ".", 1)
        record.end_s = float(output_len)

    async def aclose(self) -> None:
        return

    async def flush_cache(self) -> None:
        raise AssertionError("that is not for a load to do")


def conversation(*prompts: str | list[int], output_len: int = 2) -> LoadConversation:
    return LoadConversation(tuple(Turn(prompt, len(prompt), output_len) for prompt in prompts))


def load(
    conversations: Sequence[LoadConversation],
    traffic: Traffic = AT_ONCE,
    render: Callable[[list[ChatTurn]], BenchPrompt] = as_text,
) -> tuple[LoadResult, FakeBackend, list[RequestRecord]]:
    backend = FakeBackend()
    seen: list[RequestRecord] = []
    result = asyncio.run(run_load(backend, render, conversations, traffic, on_record=seen.append))
    return result, backend, seen


def test_arrivals_are_poisson_and_repeat_with_the_seed() -> None:
    times = arrival_times(Traffic(50.0, None, seed=3), 20_000)
    gaps = np.diff(times)
    assert times[0] == 0.0
    assert (gaps > 0).all()
    # Mean and deviation of an exponential are equal; 20,000 gaps leave 0.7 % of error, so 5 % is 7 sigma.
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.05)
    assert (arrival_times(Traffic(50.0, None, seed=3), 20_000) == times).all()
    assert (arrival_times(Traffic(50.0, None, seed=4), 20_000) != times).any()


@pytest.mark.parametrize(("burstiness", "deviation"), [(0.25, 2.0), (4.0, 0.5)])
def test_burstiness_changes_how_even_arrivals_are_and_not_their_rate(
    burstiness: float, deviation: float
) -> None:
    gaps = np.diff(arrival_times(Traffic(50.0, None, 3, burstiness), 20_000))
    # The mean's error is deviation / sqrt(20,000), at most 1.4 %: 7 % is 5 sigma or more.
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.07)
    assert gaps.std() / gaps.mean() == pytest.approx(deviation, rel=0.1)


def test_an_infinite_rate_begins_all_at_once() -> None:
    _, backend, _ = load([conversation("x")] * 9)
    assert backend.most_in_flight == 9


def test_a_finite_rate_is_kept() -> None:
    traffic = Traffic(2000.0, None, seed=1)
    planned = arrival_times(traffic, 20)
    result, _, _ = load([conversation("x")] * 20, traffic)
    assert result.duration_s >= planned[-1]
    assert len(result.records) == 20


def test_no_more_run_together_than_allowed() -> None:
    _, backend, seen = load([conversation("x")] * 9, Traffic(math.inf, 4, seed=1))
    assert backend.most_in_flight == 4
    assert len(seen) == 9


def test_a_turn_is_sent_with_all_that_came_before_it() -> None:
    result, backend, _ = load([conversation("one", "two", "three")])
    assert backend.prompts == ["one", "one..two", "one..two..three"]
    assert [record.input_len for record in result.records] == [3, 8, 15]
    _, chat, _ = load([conversation("one", "two")], render=as_messages)
    assert chat.prompts[1] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": ".."},
        {"role": "user", "content": "two"},
    ]


def test_token_ids_are_sent_as_they_are() -> None:
    _, backend, _ = load([conversation([5, 6])])
    assert backend.prompts == [[5, 6]]


def test_after_a_failed_turn_the_rest_of_its_conversation_is_failed_and_not_sent() -> None:
    result, backend, seen = load([conversation("one", "fail", "three"), conversation("other")])
    errors = [record.error for record in result.records]
    assert errors[0] is None
    assert errors[1] == "as asked"
    assert "not sent" in (errors[2] or "")
    assert errors[3] is None
    assert len(backend.prompts) == 3
    assert len(seen) == 4


# -- figures -------------------------------------------------------------------------------------------------


def record(start: float, chunks: Sequence[tuple[float, int]], **fields: object) -> RequestRecord:
    made = RequestRecord(input_len=10, asked_output_len=sum(tokens for _, tokens in chunks), start_s=start)
    for at, tokens in chunks:
        made.add_chunk(at, "x", tokens)
    made.end_s = chunks[-1][0] if chunks else start
    for name, value in fields.items():
        setattr(made, name, value)
    return made


GOOD = [
    record(0.0, [(1.0, 1), (2.0, 1), (4.0, 2)], cached_len=8, received_bytes=200, extra_bytes=30),
    record(3.0, [(3.5, 1)], received_bytes=100),
]
# Times of a failed request that would move every figure it entered.
BAD = record(0.0, [(90.0, 50), (99.0, 50)], error="broken", received_bytes=7, extra_bytes=7)


def metrics(records: list[RequestRecord], slo_ms: dict[str, float] | None = None) -> LoadMetrics:
    return compute_metrics(LoadResult(records, 0.0, 10.0, 0.002, 0.5), slo_ms=slo_ms or {}, num_retokenized=6)


def test_figures_are_exact_and_failed_requests_enter_none_but_their_count() -> None:
    found = metrics([GOOD[0], BAD, GOOD[1], BAD])
    assert (found.completed, found.failed, found.errors) == (2, 2, {"broken": 2})
    assert (found.total_input_tokens, found.total_output_tokens, found.cached_input_tokens) == (20, 5, 8)
    assert (found.request_throughput, found.input_throughput) == (0.2, 2.0)
    assert (found.output_throughput, found.total_throughput) == (0.5, 2.5)
    assert (found.ttft.mean, found.ttft.max) == (750.0, 1000.0)
    assert (found.e2e_latency.mean, found.e2e_latency.median) == (2250.0, 2250.0)
    assert found.tpot.mean == 1000.0
    assert (found.itl.mean, found.itl.max) == (1000.0, 1000.0)
    assert found.itl.std == 0.0
    assert (found.concurrency, found.max_concurrent_requests) == (0.45, 2)
    assert found.max_output_tokens_per_s == 3.0
    assert (found.itl_source, found.tokens_per_chunk) == ("token counts", 1.25)
    assert (found.max_lateness_ms, found.client_cpu_share) == (2.0, 0.5)
    assert (found.received_bytes, found.extra_bytes) == (300, 30)


def test_a_run_without_a_completed_request_has_counts_and_no_latencies() -> None:
    found = metrics([BAD])
    assert (found.completed, found.failed, found.output_throughput) == (0, 1, 0.0)
    assert found.ttft.mean is found.itl.p99 is found.cached_input_tokens is found.tokens_per_chunk is None


def test_percentiles_are_those_of_linear_interpolation() -> None:
    found = metrics([record(0.0, [(float(at), 1)]) for at in range(1, 102)])
    assert (found.ttft.median, found.ttft.p90, found.ttft.p99) == (51_000.0, 91_000.0, 100_000.0)


def test_goodput_is_what_meets_every_bound_and_failures_meet_none() -> None:
    records = [*GOOD, BAD, BAD]
    assert metrics(records).goodput is None
    loose = metrics(records, {"ttft": 1000.0, "e2el": 4000.0, "tpot": 1000.0})
    assert (loose.goodput, loose.goodput_share) == (0.2, 0.5)
    for bound in ({"ttft": 999.0}, {"tpot": 999.0}, {"e2el": 3999.0}):
        assert metrics(records, bound).goodput_share == 0.25


def test_uncounted_chunks_share_what_the_server_reports() -> None:
    made = RequestRecord(input_len=1, asked_output_len=8)
    made.add_chunk(1.0, "a", None)
    made.add_chunk(5.0, "b", None)
    made.end_s, made.reported_output_len = 5.0, 6
    found = metrics([made])
    assert (found.itl_source, found.tokens_per_chunk, found.ended_early) == ("one token per chunk", 3.0, 1)
    assert found.itl.mean == 4000.0
    assert found.max_output_tokens_per_s == 3.0


def test_the_course_of_a_run_has_all_tokens_and_who_was_in_flight() -> None:
    series = throughput_series(LoadResult([*GOOD, BAD], 0.0, 4.0, 0.0, 0.0), 1.0)
    assert series.output_throughput.tolist() == [0.0, 1.0, 1.0, 3.0]
    assert series.in_flight.tolist() == [1.0, 1.0, 1.0, 1.5]
    whole = record(0.0, [], end_s=3.5, reported_output_len=7)
    assert throughput_series(LoadResult([whole], 0.0, 4.0, 0.0, 0.0), 2.0).output_throughput.tolist() == [
        0,
        3.5,
    ]
