"""Traces of a whole launch: the phases of real requests, and an engine that is killed half-way."""

from __future__ import annotations

import json
import os
import signal

import httpx
import pytest

from tests.harness.http.otlp_collector import attributes_of, otlp_collector
from tests.harness.ring.launched import launched


def test_a_request_whose_engine_is_killed_is_one_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    flags = ("--port", "0", "--max-running-requests", "4")
    with otlp_collector() as collector, launched(*flags, "--otlp-traces-endpoint", collector.url) as launch:
        with httpx.Client(base_url=launch.url, timeout=120) as http:
            body = {"prompt": "def f(x):", "max_tokens": 40, "ignore_eos": True}
            http.post("/v1/completions", json=body).raise_for_status()
            (plain,) = collector.wait_for_roots(1)
            state = json.loads((launch.run_dir / "state.json").read_bytes())
            (engine,) = [child["pid"] for child in state["children"] if child["role"] == "scheduler"]
            body |= {"max_tokens": 400, "stream": True}
            with http.stream("POST", "/v1/completions", json=body) as response:
                lines = response.iter_lines()
                for _ in range(6):
                    next(lines)
                os.kill(engine, signal.SIGKILL)
                assert list(lines)[-2:] == ["data: [DONE]", ""]
        _, killed = collector.wait_for_roots(2)
        names = [span.name for span in collector.children_of(plain)]
        assert names == ["tokenize", "queue", "prefill", "decode", "deliver"]
        length = plain.end_time_unix_nano - plain.start_time_unix_nano
        covered = sum(
            span.end_time_unix_nano - span.start_time_unix_nano for span in collector.children_of(plain)
        )
        assert abs(length - covered) <= max(0.02 * length, 2e6)
        assert attributes_of(killed)["gen_ai.usage.output_tokens"] == 400
        children = collector.children_of(killed)
        events = [event.name for span in children for event in span.events]
        assert events.count("attempt") == 1
        assert {span.trace_id for span in children} == {killed.trace_id} != {plain.trace_id}
        assert children[-1].name == "deliver"
