"""The server's own /metrics: read as several servers write them, and held against the client's figures."""

from __future__ import annotations

import math

import pytest

from bench_serving.load import LoadResult
from bench_serving.metrics import LoadMetrics, compute_metrics
from bench_serving.records import RequestRecord
from bench_serving.report import comparison_table
from bench_serving.server_metrics import ServerFigures, compare, parse
from carousel.http_client import RequestFailure

SGLANG = b"""# HELP sglang:prompt_tokens_total Number of prefill tokens processed.
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{model_name="a b, } c"} 30.0
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{model_name="m"} 7.0
# TYPE sglang:time_to_first_token_seconds histogram
sglang:time_to_first_token_seconds_bucket{le="0.1",model_name="m"} 2.0
sglang:time_to_first_token_seconds_bucket{le="+Inf",model_name="m"} 3.0
sglang:time_to_first_token_seconds_count{model_name="m"} 3.0
sglang:time_to_first_token_seconds_sum{model_name="m"} 0.6
# TYPE sglang:e2e_request_latency_seconds histogram
sglang:e2e_request_latency_seconds_bucket{le="+Inf",model_name="m"} 3.0
sglang:e2e_request_latency_seconds_count{model_name="m"} 3.0
sglang:e2e_request_latency_seconds_sum{model_name="m"} 1.5
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 99.0
"""
FIGURES = ServerFigures(
    finished=3.0, prompt_tokens=30.0, output_tokens=7.0, ttft_count=3.0, ttft_sum=0.6, e2e_sum=1.5
)


def test_sums_and_counts_are_read_and_buckets_are_not() -> None:
    assert parse(SGLANG) == FIGURES
    assert parse(SGLANG.replace(b"sglang:", b"vllm:")) == FIGURES


def test_what_several_label_sets_say_is_added() -> None:
    more = SGLANG.replace(
        b'generation_tokens_total{model_name="m"} 7.0',
        b'generation_tokens_total{engine="0"} 3.0\nsglang:generation_tokens_total{engine="1"} 4.5',
    )
    assert parse(more).output_tokens == 7.5


def test_a_server_that_has_counted_nothing_yet_has_zeros() -> None:
    assert parse(b"sglang:num_running_reqs 0.0\n").finished == 0.0


@pytest.mark.parametrize("body", [b"", b"process_cpu_seconds_total 3.0\n", b"<html>not here</html>", b"\xff"])
def test_metrics_of_another_kind_are_none(body: bytes) -> None:
    with pytest.raises(RequestFailure, match="/metrics"):
        parse(body)


def test_a_run_is_the_difference_of_two_scrapes() -> None:
    doubled = ServerFigures(**{name: 2 * getattr(FIGURES, name) for name in FIGURES.__struct_fields__})
    assert doubled.since(FIGURES) == FIGURES


def figures(num_records: int = 3, *, first_s: float = 0.2, last_s: float = 0.5) -> LoadMetrics:
    """Return the metrics of requests that FIGURES describe, unless told otherwise."""
    records = []
    for output_len in (2, 2, 3)[:num_records]:
        record = RequestRecord(input_len=10, asked_output_len=output_len)
        record.add_chunk(first_s, "x", 1)
        record.add_chunk(last_s, "x", output_len - 1)
        record.end_s = last_s
        records.append(record)
    return compute_metrics(LoadResult(records, 0.0, 1.0, 0.0, 0.0), slo_ms={}, num_retokenized=None)


def differing(metrics: LoadMetrics, server: ServerFigures = FIGURES) -> list[str]:
    return [each.name for each in compare(metrics, server) if not each.agrees]


def test_counts_must_be_equal() -> None:
    assert differing(figures()) == []
    assert differing(figures(2)) == ["Finished requests", "Input tokens", "Generated tokens"]


@pytest.mark.parametrize(("first_s", "agrees"), [(0.2059, True), (0.2061, False), (0.1939, False)])
def test_means_may_be_three_percent_apart(first_s: float, agrees: bool) -> None:
    assert differing(figures(first_s=first_s)) == ([] if agrees else ["Mean TTFT (ms)"])


@pytest.mark.parametrize(("first_s", "agrees"), [(0.0119, True), (0.0121, False)])
def test_short_means_may_be_two_milliseconds_apart(first_s: float, agrees: bool) -> None:
    fast = ServerFigures(
        finished=3.0, prompt_tokens=30.0, output_tokens=7.0, ttft_count=3.0, ttft_sum=0.03, e2e_sum=1.5
    )
    assert differing(figures(first_s=first_s), fast) == ([] if agrees else ["Mean TTFT (ms)"])


def test_what_one_side_does_not_have_is_not_compared() -> None:
    record = RequestRecord(input_len=10, asked_output_len=7, reported_output_len=7, end_s=0.5)
    whole = compute_metrics(LoadResult([record], 0.0, 1.0, 0.0, 0.0), slo_ms={}, num_retokenized=None)
    assert [each.name for each in compare(whole, FIGURES)][3:] == ["Mean E2E Latency (ms)"]
    nothing = ServerFigures(
        finished=0.0, prompt_tokens=0.0, output_tokens=0.0, ttft_count=0.0, ttft_sum=0.0, e2e_sum=0.0
    )
    counts = compare(figures(), nothing)
    assert len(counts) == 3
    assert {each.difference for each in counts} == {math.inf}


def test_the_table_marks_what_differs() -> None:
    lines = comparison_table(compare(figures(first_s=0.2061, last_s=0.5061), FIGURES)).splitlines()
    assert [line.split()[-1] for line in lines[1:]] == ["+0.00%", "+0.00%", "+0.00%", "differs", "+1.22%"]
