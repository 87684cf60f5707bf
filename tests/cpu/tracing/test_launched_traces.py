"""Traces of a whole launch: the phases of real requests, of those that end early, and of one whose engine is
killed half-way.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from typing import Any, NamedTuple

import httpx
import pytest

from runtime.ring.endpoints import Endpoints
from runtime.wire.status_page import StatusPage
from tests.harness.http.otlp_collector import Collector, attributes_of, otlp_collector
from tests.harness.ring.launched import Launched, launched, wait_until

BODY = {"prompt": "def f(x):", "max_tokens": 40, "ignore_eos": True}
PHASES = ["tokenize", "queue", "prefill", "decode", "deliver"]


class Traced(NamedTuple):
    launch: Launched
    collector: Collector
    http: httpx.Client

    def root(self, request_id: str) -> Any:
        """Wait for the root of a request by its X-Request-Id; all of its tree is there then."""

        def found() -> list[Any]:
            roots = [span for span in self.collector.spans if span.kind == 2]
            return [root for root in roots if attributes_of(root)["carousel.request_id"] == request_id]

        wait_until(lambda: bool(found()), 10.0, f"the trace of {request_id}")
        (root,) = found()
        return root

    def check_cover(self, root: Any) -> list[str]:
        """Names of the phases of one sequence, in order, which cover the root."""
        children = self.collector.children_of(root)
        covered = [(span.start_time_unix_nano, span.end_time_unix_nano) for span in children]
        length = root.end_time_unix_nano - root.start_time_unix_nano
        assert covered == sorted(covered)
        assert abs(length - sum(end - begin for begin, end in covered)) <= max(0.02 * length, 2e6)
        assert {span.trace_id for span in children} == {root.trace_id}
        return [span.name for span in children]


@pytest.fixture(scope="module")
def traced() -> Iterator[Traced]:
    with pytest.MonkeyPatch.context() as patch, otlp_collector() as collector:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        flags = ("--port", "0", "--max-running-requests", "4", "--otlp-traces-endpoint", collector.url)
        with launched(*flags) as launch, httpx.Client(base_url=launch.url, timeout=120) as http:
            yield Traced(launch, collector, http)


def test_the_phases_of_a_request_cover_it(traced: Traced) -> None:
    traced.http.post("/v1/completions", json=BODY, headers={"X-Request-Id": "plain"}).raise_for_status()
    assert traced.check_cover(traced.root("plain")) == PHASES


@pytest.mark.parametrize("way", ["leaves", "aborts"])
@pytest.mark.parametrize("stream", [True, False])
def test_one_that_ends_early_has_its_phases_up_to_there(traced: Traced, way: str, *, stream: bool) -> None:
    request_id = f"{way}-{stream}"
    body = BODY | {"max_tokens": 1500, "stream": stream}
    headers = {"X-Request-Id": request_id}

    def num_running() -> int:
        running: int = traced.http.get("/stats").json()["num_running"]
        return running

    page = StatusPage(Endpoints(traced.launch.run_dir).status_file)
    num_finished = page.read("scheduler").num_finished

    def has_tokens() -> bool:
        return page.read("scheduler").num_finished > num_finished + 2

    if stream:
        with traced.http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
            lines = answer.iter_lines()
            next(lines)
            if way == "aborts":
                traced.http.post("/abort_request", json={"rid": request_id}).raise_for_status()
                list(lines)
    elif way == "leaves":
        host, port = traced.launch.url.removeprefix("http://").split(":")
        head = {**headers, "Content-Type": "application/json"}
        with closing(HTTPConnection(host, int(port))) as leaving:
            leaving.request("POST", "/v1/completions", json.dumps(body), head)
            wait_until(has_tokens, 10.0, "it has tokens")
    else:
        with httpx.Client(base_url=traced.launch.url, timeout=60) as other, ThreadPoolExecutor(1) as pool:
            asked = pool.submit(other.post, "/v1/completions", json=body, headers=headers)
            wait_until(has_tokens, 10.0, "it has tokens")
            traced.http.post("/abort_request", json={"rid": request_id}).raise_for_status()
            asked.result()
    root = traced.root(request_id)
    assert traced.check_cover(root) == PHASES
    assert attributes_of(root)["gen_ai.response.finish_reasons"] == ["abort"]
    wait_until(lambda: num_running() == 0, 5.0, "the row is free")
    page.close()


def test_a_retraction_is_a_second_wait(traced: Traced) -> None:
    body = BODY | {"max_tokens": 200, "stream": True}
    headers = {"X-Request-Id": "retracted"}
    with traced.http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        lines = answer.iter_lines()
        next(lines)
        traced.http.post("/pause_generation", json={"mode": "retract"}).raise_for_status()
        traced.http.post("/continue_generation").raise_for_status()
        list(lines)
    names = traced.check_cover(traced.root("retracted"))
    assert names == [*PHASES[:4], "queue", "decode", "deliver"]


def test_a_request_whose_engine_is_killed_is_one_trace(traced: Traced) -> None:
    state = json.loads((traced.launch.run_dir / "state.json").read_bytes())
    (engine,) = [child["pid"] for child in state["children"] if child["role"] == "scheduler"]
    body = BODY | {"max_tokens": 400, "stream": True}
    headers = {"X-Request-Id": "killed"}
    with traced.http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        lines = response.iter_lines()
        for _ in range(6):
            next(lines)
        os.kill(engine, signal.SIGKILL)
        assert list(lines)[-2:] == ["data: [DONE]", ""]
    killed = traced.root("killed")
    assert attributes_of(killed)["gen_ai.usage.output_tokens"] == 400
    names = traced.check_cover(killed)
    events = [event.name for span in traced.collector.children_of(killed) for event in span.events]
    assert events.count("attempt") == 1
    assert names.count("tokenize") == 2
    assert names[-1] == "deliver"
