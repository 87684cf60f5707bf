"""Traces of HTTP requests: one tree each, under the caller's parent; a collector that fails harms nobody."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_args

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from runtime.wire.messages import GenerateRequest, SequenceOutput
from runtime.wire.perf_metrics import Stamp, StampName
from tests.cpu.http.test_http_control import INFO
from tests.harness.http.http_front import Front, http_front
from tests.harness.http.otlp_collector import Collector, attributes_of, otlp_collector
from tests.harness.ring.fake_ring import failure, finish, output
from tests.harness.ring.launched import SLACK, wait_until

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01", "tracestate": "vendor=1"}
NAMES = (*get_args(StampName)[:5], "first_token", "last_token", "closed", "detokenizer")
CANARY = "canary-of-the-prompt"
MOST_FOR_A_HEADER_S = 0.02


def answer(request: GenerateRequest) -> list[SequenceOutput]:
    """Answer of a ring that answers at once: its stamps are those of the last moment."""
    if request.text == "refuse":
        return [failure(request, "invalid_value", 400, "text")]
    outputs = []
    for index in range(request.sampling.n):
        trace = request.trace
        if trace is not None:
            now = time.monotonic()
            trace = trace.add(*(Stamp(name, now + at * 1e-6) for at, name in enumerate(NAMES)))
        ended = msgspec.structs.replace(finish(), trace=trace)
        outputs.append(output(request, "abc", index=index, finish=ended))
    return outputs


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with otlp_collector() as collector:
        yield collector


@pytest.fixture
def front(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with http_front(tmp_path_factory.mktemp("run"), answer, otlp_traces_endpoint=collector.url) as front:
        yield front


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_one_tree_under_its_callers_span(
    front: Front, collector: Collector, stream: bool
) -> None:
    body = {"prompt": CANARY, "max_tokens": 9, "temperature": 0.5, "stream": stream}
    headers = {**SAMPLED, "X-Request-Id": "mine"}
    assert front.http.post("/v1/completions", json=body, headers=headers).status_code == 200
    (root,) = collector.wait_for_roots(1)
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE_ID, SPAN_ID)
    assert root.trace_state == "vendor=1"
    assert root.name == "text_completion fake"
    about = attributes_of(root)
    assert about["gen_ai.operation.name"] == "text_completion"
    assert (about["gen_ai.request.max_tokens"], about["gen_ai.request.temperature"]) == (9, 0.5)
    assert about["gen_ai.usage.input_tokens"] == 5
    assert about["gen_ai.response.finish_reasons"] == ["stop"]
    assert about["carousel.request_id"] == "mine"
    children = sorted(collector.children_of(root), key=lambda span: span.start_time_unix_nano)
    assert [span.name for span in children] == ["tokenize", "queue", "prefill", "decode", "deliver"]
    assert children[0].start_time_unix_nano == root.start_time_unix_nano
    assert children[-1].end_time_unix_nano == root.end_time_unix_nano
    for before, after in itertools.pairwise(children):
        assert before.end_time_unix_nano == after.start_time_unix_nano, "no gap"
    assert abs(root.end_time_unix_nano / 1e9 - time.time()) < 60
    assert collector.resources[0]["service.name"] == "carousel"
    assert CANARY not in repr(collector.spans)
    (request,) = front.ring.requests
    assert request.trace is not None
    assert request.trace.context[16:24] == root.span_id, "the ring's parent is the root"


def test_with_trace_content_prompts_and_outputs_are_told_and_are_bounded(
    collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> None:
    settings: dict[str, Any] = {"otlp_traces_endpoint": collector.url, "trace_content": True}
    with http_front(tmp_path_factory.mktemp("run"), answer, **settings) as front:
        front.post("/v1/completions", prompt=[CANARY, "y" * 20_000], stream=True)
        messages = [{"role": "system", "content": "be"}, {"role": "user", "content": CANARY}]
        front.post("/v1/chat/completions", messages=messages)
        front.post("/v1/completions", prompt=[1, 2, 3])
        front.post("/v1/messages", max_tokens=9, system="be", messages=messages[1:])
        roots = {
            attributes_of(root)["gen_ai.operation.name"] + str(n): attributes_of(root)
            for n, root in enumerate(collector.wait_for_roots(4))
        }
    plain, chat, ids = roots["text_completion0"], roots["chat1"], roots["text_completion2"]
    first, second = json.loads(plain["gen_ai.input.messages"])
    assert first == {"role": "user", "parts": [{"type": "text", "content": ""}]}
    assert second["parts"][0]["content"] == "y" * 16_384
    outputs = json.loads(plain["gen_ai.output.messages"])
    said = {"role": "assistant", "parts": [{"type": "text", "content": "abc"}], "finish_reason": "stop"}
    assert outputs == [said, said]
    assert [turn["role"] for turn in json.loads(chat["gen_ai.input.messages"])] == ["system", "user"]
    assert CANARY in chat["gen_ai.input.messages"]
    assert "gen_ai.input.messages" not in ids
    anthropics = roots["chat3"]
    assert anthropics["url.path"] == "/v1/messages"
    assert anthropics["gen_ai.input.messages"] == chat["gen_ai.input.messages"]
    assert json.loads(ids["gen_ai.output.messages"]) == [said]


def test_each_sequence_of_each_prompt_has_its_phases(front: Front, collector: Collector) -> None:
    front.post("/v1/completions", prompt=["x", "y"], n=2)
    (root,) = collector.wait_for_roots(1)
    assert not root.parent_span_id
    of = [(attributes_of(span), span.name) for span in collector.children_of(root)]
    decodes = sorted((a["carousel.prompt"], a["carousel.sequence"]) for a, name in of if name == "decode")
    assert decodes == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert attributes_of(root)["gen_ai.usage.input_tokens"] == 10


def test_a_refusal_is_a_root_with_its_error(front: Front, collector: Collector) -> None:
    assert front.complete(prompt="refuse").status_code == 400
    (root,) = collector.wait_for_roots(1)
    assert attributes_of(root)["error.type"] == "invalid_value"
    assert root.status.code == 2


def test_what_callers_send_beside_their_span_is_neither_logged_nor_read(
    front: Front, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    def least_cpu_s(headers: dict[str, str]) -> float:
        took = []
        for _ in range(5):
            began_s = time.process_time()
            front.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
            took.append(time.process_time() - began_s)
        return min(took)

    parent = {"traceparent": SAMPLED["traceparent"]}
    blanks = CANARY + "=b" + " " * 8000 + "c"
    plain_s, blanks_s = least_cpu_s({**parent, "x-other": blanks}), least_cpu_s({**parent, "baggage": blanks})
    assert blanks_s < plain_s + MOST_FOR_A_HEADER_S
    for junk in (CANARY, f"{CANARY}=1,{CANARY}=2", f"{CANARY}=" + "v" * 9000, f",{CANARY}" * 500):
        answer = front.http.post(
            "/v1/completions", json={"prompt": "x"}, headers={**parent, "tracestate": junk, "baggage": junk}
        )
        assert answer.status_code == 200
    front.http.post("/v1/completions", json={"prompt": "x"}, headers={"traceparent": CANARY * 100})
    (root, *_) = collector.wait_for_roots(15)
    assert root.trace_id.hex() == TRACE_ID
    assert [r.getMessage() for r in caplog.records if r.name.startswith("opentelemetry")] == []


def test_what_is_not_sampled_exports_nothing(
    collector: Collector, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", collector.url)
    with http_front(tmp_path_factory.mktemp("run"), answer) as front:
        assert front.complete().status_code == 200
        not_sampled = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-00"}
        front.http.post("/v1/completions", json={"prompt": "x"}, headers=not_sampled)
        assert [request.trace for request in front.ring.requests] == [None, None]
        front.http.post("/v1/completions", json={"prompt": "x"}, headers=SAMPLED)
        (root,) = collector.wait_for_roots(1)
    assert root.trace_id.hex() == TRACE_ID
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE_ID}


@pytest.mark.parametrize("fault", ["down", "slow", "500"])
def test_a_collector_that_fails_harms_no_request_and_losses_are_counted(
    collector: Collector,
    fault: str,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "40")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "20")
    collector.status, collector.delay_s = (500 if fault == "500" else 200), (60.0 if fault == "slow" else 0.0)
    if fault == "down":
        collector.close()
    num_requests, num_spans = 60, 6
    with http_front(tmp_path_factory.mktemp("run"), answer, otlp_traces_endpoint=collector.url) as front:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda _: front.complete().status_code, range(num_requests)))
        assert answers == [200] * num_requests

        def are_lost() -> bool:
            counts = span_counts(front)
            assert not counts["exported"]
            return counts["failed"] + counts["dropped"] >= num_requests * num_spans - 60

        # The answers go out before their traces.
        wait_until(are_lost, 5.0, "all but the queue and one batch are lost")
        started = time.monotonic()
    assert time.monotonic() - started < 5.0 * SLACK, "it does not wait for the collector to end"


def span_counts(front: Front) -> dict[str, float]:
    front.ring.info = INFO
    families = text_string_to_metric_families(front.http.get("/metrics").text)
    values = {sample.name: sample.value for family in families for sample in family.samples}
    return {kind: values[f"carousel:trace_spans_{kind}_total"] for kind in ("exported", "failed", "dropped")}


def test_spans_that_were_taken_are_counted(front: Front, collector: Collector) -> None:
    front.complete()
    collector.wait_for_roots(1)
    expected = {"exported": 6, "failed": 0, "dropped": 0}
    wait_until(lambda: span_counts(front) == expected, 5.0, "the spans are counted")
