"""Metrics of several HTTP processes: a scrape shows them all, whichever of them answers it."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from carousel.client.core.result import Delta
from carousel.server.admin.metrics import Metrics, RequestTimer
from runtime.wire.messages import ControlRequest, Usage
from runtime.wire.status_page import ProcessStatus
from tests.cpu.http.test_http_control import INFO
from tests.harness.http.http_front import http_front
from tests.harness.ring.launched import launched

NUM_SCRAPES = 10
OTHER_PROCESS = """
import sys
import time
from pathlib import Path
from typing import Any
from carousel.server.admin.metrics import Metrics
metrics = Metrics("m", Path(sys.argv[1]), 1)
metrics.requests.inc(3)
metrics.time_to_first_token.observe(0.02)
"""


def values(metrics: Metrics) -> dict[str, float]:
    text = metrics.render(ProcessStatus(), INFO).decode()
    return {
        sample.name.removeprefix("sglang:") + sample.labels.get("le", ""): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_process_tells_the_sum_of_all(tmp_path: Path) -> None:
    first, second = Metrics("m", tmp_path, 0), Metrics("m", tmp_path, 7)
    first.requests.inc()
    second.requests.inc(2)
    first.e2e_latency.observe(0.3)
    second.e2e_latency.observe(70.0, 2)
    assert values(first) == values(second)
    total = values(first)
    assert total["num_requests_total"] == 3
    assert total["e2e_request_latency_seconds_count"] == 3
    assert total["e2e_request_latency_seconds_sum"] == pytest.approx(140.3)
    assert total["e2e_request_latency_seconds_bucket0.5"] == 1
    assert total["e2e_request_latency_seconds_bucket80.0"] == 3


def test_another_process_is_counted_and_still_is_when_it_has_gone(tmp_path: Path) -> None:
    metrics = Metrics("m", tmp_path)
    subprocess.run([sys.executable, "-c", OTHER_PROCESS, str(tmp_path)], check=True)
    metrics.requests.inc()
    total = values(metrics)
    assert total["num_requests_total"] == 4
    assert total["time_to_first_token_seconds_bucket0.025"] == 1


def test_a_process_that_is_started_again_goes_on_counting(tmp_path: Path) -> None:
    Metrics("m", tmp_path).requests.inc(5)
    metrics = Metrics("m", tmp_path)
    metrics.requests.inc()
    assert values(metrics)["num_requests_total"] == 6


def test_a_value_on_a_bound_is_below_it(tmp_path: Path) -> None:
    metrics = Metrics("m", tmp_path)
    metrics.time_to_first_token.observe(0.005)
    assert values(metrics)["time_to_first_token_seconds_bucket0.005"] == 1


def test_a_request_of_several_sequences_counts_its_prompt_once(tmp_path: Path) -> None:
    metrics = Metrics("m", tmp_path)
    with RequestTimer(metrics, time.perf_counter() - 60.0, 3) as timer:
        timer.note_delta(Delta("a", [1], [], index=0))
        timer.note_delta(Delta("b", [1, 2], [], index=1))
        timer.note_delta(Delta("c", [3], [], "stop", None, Usage(10, 2, 4), index=0))
        timer.note_delta(Delta("", [], [], "stop", None, Usage(10, 2, 8), index=1))
    total = values(metrics)
    assert total["num_requests_total"] == 3
    assert total["num_aborted_requests_total"] == 1
    assert total["e2e_request_latency_seconds_count"] == 2
    assert total["time_to_first_token_seconds_count"] == 2
    assert total["time_to_first_token_seconds_sum"] >= 120.0, "its waits before it was submitted count"
    assert total["e2e_request_latency_seconds_sum"] >= 120.0
    assert total["inter_token_latency_seconds_count"] == 1
    assert (total["prompt_tokens_total"], total["cached_tokens_total"]) == (10, 4)
    assert total["generation_tokens_total"] == 4
    assert total["cache_hit_rate"] == 0.4


def test_a_scrape_of_a_launch_with_several_workers_counts_every_request() -> None:
    with launched("--api-workers", "2", module="tests.harness.ring.sleeping_worker") as launch:
        body = {"prompt": "x", "max_tokens": 1}
        for _ in range(12):  # each on a connection of its own, which either worker may take
            assert httpx.post(f"{launch.url}/v1/completions", json=body, timeout=60.0).status_code == 200
        for _ in range(6):
            text = httpx.get(f"{launch.url}/metrics", timeout=60.0).text
            (line,) = [line for line in text.splitlines() if line.startswith("sglang:num_requests_total{")]
            assert float(line.rpartition(" ")[2]) == 12
        assert len(list(launch.run_dir.glob("metrics*"))) == 2


def test_adapters_are_counted_where_they_are_served(tmp_path: Path) -> None:
    def text_of(info: dict[str, Any]) -> str:
        return Metrics("m", tmp_path).render(ProcessStatus(), info).decode()

    found = text_of(INFO)
    for line in (
        'sglang:lora_pool_utilization{model_name="m"} 0.75',
        'carousel:lora_slots_leased{model_name="m"} 2.0',
        'carousel:lora_evictions_total{model_name="m"} 3.0',
        'carousel:lora_requests_total{lora_name="sql",model_name="m"} 8.0',
        'carousel:lora_requests_total{lora_name="chat",model_name="m"} 3.0',
    ):
        assert f"\n{line}\n" in found
    plain = {name: value for name, value in INFO.items() if "adapter" not in name and name != "max_loras"}
    assert "lora" not in text_of(plain)


def test_scrapes_that_come_while_one_is_under_way_share_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carousel.server.server_state.CONTROL_TIMEOUT_S", 2.0)
    with http_front(tmp_path) as front, ThreadPoolExecutor(NUM_SCRAPES) as pool:
        front.ring.answers_questions = False
        statuses = list(pool.map(lambda _: front.http.get("/metrics").status_code, range(NUM_SCRAPES)))
        asked = [each for _, each in front.ring.arrivals if isinstance(each, ControlRequest)]
    assert statuses == [503] * NUM_SCRAPES
    assert len(asked) <= 2, "for all of them"
