"""Statistics of a whole launch, with a workload whose counts are known: SDK, HTTP and Prometheus say the
same, and a reader that is gone or never reads changes nothing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from carousel.client.sync import Client
from runtime.wire.sampling_params import SamplingParams
from runtime.wire.stats import IterationStats, RequestStats
from tests.harness.ring.launched import ROOT, Launched, launched, wait_until

PAGE = 16
PROMPT = list(range(5, 5 + 100))
"""Chunks of 64 and 36 tokens; 6 full pages."""
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, seed=1)

READER = """
import sys
from pathlib import Path
from carousel.client.sync import Client
with Client(Path(sys.argv[1])) as client:
    stream = client.watch_stats(timeout=60)
    print(next(stream).iter, flush=True)
    if sys.argv[2] == "reads":
        for stats in stream:
            pass
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def launch() -> Iterator[Launched]:
    arguments = ("--chunked-prefill-size", "64", "--page-size", str(PAGE), "--max-running-requests", "4")
    with launched(*arguments, "--request-stats-max-iterations", "200") as launch:
        yield launch


@pytest.fixture
def client(launch: Launched) -> Iterator[Client]:
    with Client(launch.run_dir) as client:
        client.flush_cache()
        yield client


def counters(launch: Launched) -> dict[str, float]:
    with httpx.Client(base_url=launch.url, timeout=60) as http:
        text = http.get("/metrics").raise_for_status().text
    return {
        sample.name.removeprefix("sglang:"): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "le" not in sample.labels
    }


def as_json(records: object) -> Any:
    return json.loads(msgspec.json.encode(records))


def work(client: Client) -> None:
    """A prompt that is new, then the same again: its 6 full pages are found, and 4 tokens computed."""
    assert client.generate(PROMPT, GREEDY, timeout=60).usage.cached_tokens == 0
    assert client.generate(PROMPT, GREEDY, timeout=60).usage.cached_tokens == 96


def done_after(client: Client, first: int) -> list[IterationStats]:
    """Steps that `work` has left: two chunks and seven decodes, then one chunk and seven decodes."""
    wait_until(lambda: len(client.iteration_stats(first)) >= 17, 30.0, "the last step is committed")
    return client.iteration_stats(first)


def test_counts_of_a_known_workload_are_the_same_everywhere(launch: Launched, client: Client) -> None:
    before = counters(launch)
    first = int(before["num_iterations_total"])
    work(client)
    records = done_after(client, first)
    after = counters(launch)
    assert [each.iter for each in records] == list(range(first + 1, first + 18))
    steps = [each.inflight_batching_stats for each in records if each.inflight_batching_stats]
    assert [each.num_ctx_tokens for each in steps] == [64, 36, *[0] * 7, 4, *[0] * 7]
    assert [each.num_context_requests for each in steps] == [1, 1, *[0] * 7, 1, *[0] * 7]
    assert [each.num_gen_requests for each in steps] == [0, 0, *[1] * 7, 0, *[1] * 7]
    assert sum(each.num_recomputed_ctx_tokens for each in steps) == 0
    assert sum(each.num_new_active_requests for each in records) == 2
    pages = [each.kv_cache_stats for each in records]
    assert all(each.free_num_blocks + each.used_num_blocks == each.max_num_blocks for each in pages)
    assert pages[-1].used_num_blocks == 0
    moved = {name: after[name] - before[name] for name in after if name in before}
    assert moved["num_iterations_total"] == 17
    assert moved["context_tokens_total"] == 104
    assert moved["recomputed_tokens_total"] == 0
    assert moved["iteration_latency_seconds_count"] == 17
    took_ms = sum(each.iter_latency_ms for each in records)
    assert moved["iteration_latency_seconds_sum"] * 1e3 == pytest.approx(took_ms, abs=1e-3)
    # A prompt of 100 and 7 of 8 output tokens take 7 pages; the second time 6 of them are reused.
    assert moved["kv_new_blocks_total"] == 7 + 1
    assert moved["kv_reused_blocks_total"] == 6
    assert moved["kv_missed_blocks_total"] == 7 + 1
    with httpx.Client(base_url=launch.url, timeout=60) as http:
        found = http.get("/stats/iterations", params={"after": first}).raise_for_status().json()
    assert found == as_json(records)
    last = pages[-1]
    for name, counter in (
        ("alloc_new_blocks", "kv_new_blocks_total"),
        ("reused_blocks", "kv_reused_blocks_total"),
        ("missed_blocks", "kv_missed_blocks_total"),
    ):
        assert getattr(last, name) == after[counter]


def test_requests_of_a_known_workload_over_sdk_and_http(launch: Launched, client: Client) -> None:
    first = int(counters(launch)["num_iterations_total"])
    work(client)
    done_after(client, first)
    records = client.request_stats(first)
    assert [each.iter for each in records] == list(range(first + 1, first + 18))
    of_each: dict[int, list[RequestStats]] = {}
    for record in records:
        for each in record.request_stats:
            of_each.setdefault(each.id, []).append(each)
    new, again = of_each.values()
    # When the first chunk has ended, the step of the second one has been launched, or not.
    assert new[0].context_prefill_position in (64, 100)
    assert {each.context_prefill_position for each in (*new[1:], *again)} == {100}
    assert [each.num_generated_tokens for each in new] == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert [each.num_generated_tokens for each in again] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert {each.reused_blocks_per_request for each in new} == {0}
    assert {each.reused_blocks_per_request for each in again} == {6}
    assert {each.missed_blocks_per_request for each in again} == {1}
    for one in (new, again):
        assert one[-1].stage == "GENERATION_COMPLETE"
        assert all(each.scheduled for each in one)
        assert {each.request_id is None for each in one} == {False}
    with httpx.Client(base_url=launch.url, timeout=60) as http:
        found = http.get("/stats/requests", params={"after": first}).raise_for_status().json()
        refused = http.get("/stats/requests", params={"after": "x"})
    # The HTTP server is another client: it is not told the ids of these requests.
    for record in found:
        for each in record["requestStats"]:
            assert each.pop("requestId") is None
    mine = as_json(records)
    for record in mine:
        for each in record["requestStats"]:
            del each["requestId"]
    assert found == mine
    assert refused.status_code == 400


def test_times_of_a_request_are_the_clients(launch: Launched, client: Client) -> None:
    params = msgspec.structs.replace(GREEDY, return_perf_metrics=True, n=2)
    began_s, arrival_time, sent_s = time.monotonic(), time.time(), time.monotonic()
    outputs = client.generate(PROMPT, params, arrival_time=arrival_time, timeout=60).outputs
    ended_s = time.monotonic()
    (plain,) = client.generate(PROMPT, GREEDY, timeout=60).outputs
    numbers = [each.iter for each in client.iteration_stats()]
    assert plain.request_perf_metrics is None
    assert len(outputs) == 2
    for output in outputs:
        metrics = output.request_perf_metrics
        assert metrics is not None
        times = metrics.timing_metrics
        assert times.first_scheduled_time is not None
        assert times.first_token_time is not None
        assert times.last_token_time is not None
        # The tokenizer reads two clocks one after the other, and may be held up between them.
        assert began_s - 0.5 <= times.arrival_time <= sent_s + 0.5
        assert times.arrival_time <= times.first_scheduled_time < times.first_token_time
        assert times.first_token_time < times.last_token_time < ended_s
        pages = metrics.kv_cache_metrics
        assert pages.num_reused_blocks + pages.num_missed_blocks == 7
        assert metrics.first_iter in numbers
        assert metrics.last_iter in numbers
        assert metrics.last_iter - metrics.first_iter >= 7
    with httpx.Client(base_url=launch.url, timeout=60) as http:
        body = {"text": "x", "sampling_params": {"return_perf_metrics": True}}
        refused = http.post("/generate", json=body)
    assert refused.status_code == 400
    assert "return_perf_metrics" in refused.text


@pytest.mark.parametrize("kind", ["reads", "never"])
def test_a_reader_that_stops_or_is_killed_changes_nothing(
    launch: Launched, client: Client, kind: str
) -> None:
    """The same work with and without it: as many steps, the same tokens."""
    first = int(counters(launch)["num_iterations_total"])
    work(client)
    alone = [each.inflight_batching_stats for each in done_after(client, first)]
    command = [sys.executable, "-c", READER, str(launch.run_dir), kind]
    reader = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert reader.stdout is not None
        assert int(reader.stdout.readline()) >= 1
        if kind == "reads":
            os.kill(reader.pid, signal.SIGKILL)
        client.flush_cache()
        first += 17
        work(client)
        watched = [each.inflight_batching_stats for each in done_after(client, first)]
    finally:
        reader.kill()
        reader.communicate()
    assert watched == alone
    assert int(counters(launch)["num_iterations_total"]) == first + 17
