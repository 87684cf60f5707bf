"""Other servers' metrics: docs have the table, and what is said to be the same is there under their names."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from carousel.client.core.result import Delta
from carousel.server.admin import metric_names
from carousel.server.admin.metric_names import ALIASES, SGLANG, VLLM
from carousel.server.admin.metrics import REASONS, Metrics, RequestTimer
from runtime.base.errors import RequestError
from runtime.wire.messages import Usage
from runtime.wire.status_page import ProcessStatus
from tests.cpu.http.test_http_control import INFO

Sample = tuple[str, tuple[tuple[str, str], ...]]


def samples(metrics: Metrics, processes: dict[str, ProcessStatus] | None = None) -> dict[Sample, float]:
    text = metrics.render(ProcessStatus(num_running=3, num_waiting=4), INFO, processes or {}).decode()
    found: dict[Sample, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "model_name"}
            key = (sample.name, tuple(sorted(labels.items())))
            assert key not in found, "given twice"
            found[key] = sample.value
    return found


def test_the_page_is_what_the_table_says() -> None:
    text = metric_names.DOCS.read_text()
    assert metric_names.written(text) == text, "python -m carousel.server.admin.metric_names"


@pytest.mark.parametrize("metrics", [VLLM, SGLANG])
def test_each_is_there_once_and_says_what_becomes_of_it(metrics: tuple[metric_names.PeerMetric, ...]) -> None:
    names = [metric.name for metric in metrics]
    assert len(names) == len(set(names))
    for metric in metrics:
        assert bool(metric.ours) == (metric.how != "absent"), metric.name
        assert metric.note or metric.how == "same", metric.name


def test_what_is_named_here_is_emitted(tmp_path: Path) -> None:
    metrics = Metrics("m", tmp_path)
    text = metrics.render(ProcessStatus(), INFO).decode()
    names = {family.name for family in text_string_to_metric_families(text)}
    assert {metric.ours for metric in (*VLLM, *SGLANG) if metric.ours} <= names
    for metric in SGLANG:
        assert metric.how != "same" or metric.ours == f"sglang:{metric.name}"
    assert not any(name.startswith("vllm:") for name in names), "only with --metrics-names vllm"


def test_vllms_names_have_our_values(tmp_path: Path) -> None:
    metrics = Metrics("m", tmp_path, has_vllm_names=True)
    with RequestTimer(metrics, time.perf_counter()) as timer:
        timer.note_finished(Usage(5, 7), ["stop"])
    found = samples(metrics)
    engine = ("engine", "0")
    assert found["vllm:num_requests_running", (engine,)] == 3
    assert found["vllm:num_requests_waiting", (engine,)] == 4
    assert found["vllm:num_preemptions_total", (engine,)] == INFO["num_retracted"]
    assert found["vllm:request_success_total", (engine, ("finished_reason", "stop"))] == 1
    assert found["vllm:request_success_total", (engine, ("finished_reason", "length"))] == 0
    assert found["vllm:e2e_request_latency_seconds_count", (engine,)] == 1
    assert found["vllm:request_queue_time_seconds_bucket", (engine, ("le", "+Inf"))] == 7
    emitted = {name for name, _ in found if name.startswith("vllm:")}
    for alias in ALIASES:
        assert any(name.startswith(f"vllm:{alias.name}") for name in emitted), alias.name
    ours = {key: value for key, value in found.items() if not key[0].startswith("vllm:")}
    assert samples(Metrics("m", tmp_path, 1)) == ours, "the default stays"


def test_every_sequence_is_counted_by_how_it_ended(tmp_path: Path) -> None:
    metrics, now = Metrics("m", tmp_path), time.perf_counter()
    with RequestTimer(metrics, now, 2) as timer:
        timer.note_finished(Usage(5, 7), ["stop", "length"])
    with RequestTimer(metrics, now, 3) as timer:
        timer.note_delta(Delta("", [1], [], "timeout", None, Usage(5, 1)))
    for error in (RequestError("no"), RequestError("ended", code="aborted")):
        with pytest.raises(RequestError), RequestTimer(metrics, now):
            raise error
    found = samples(metrics)
    counts = {
        reason: found["carousel:finished_sequences_total", (("finish_reason", reason),)] for reason in REASONS
    }
    assert counts == {"stop": 1, "length": 1, "timeout": 1, "abort": 3, "error": 1}
    assert sum(counts.values()) == found["sglang:num_requests_total", ()] == 7


def test_processes_are_told_apart(tmp_path: Path) -> None:
    processes = {
        "scheduler": ProcessStatus(epoch=3, state="ready"),
        "tokenizer0": ProcessStatus(epoch=1, state="loading"),
    }
    found = samples(Metrics("m", tmp_path), processes)
    ready = {key[1][0][1]: value for key, value in found.items() if key[0] == "carousel:process_ready"}
    epochs = {key[1][0][1]: value for key, value in found.items() if key[0] == "carousel:process_epoch"}
    assert ready == {"scheduler": 1, "tokenizer0": 0}
    assert epochs == {"scheduler": 2, "tokenizer0": 0}
    assert found["carousel:restarts_total", ()] == 2
