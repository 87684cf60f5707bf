"""How traces go out: over gRPC, and in bounded memory where nobody takes them."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import msgspec
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from carousel.client.core.request_builder import Submission
from carousel.server.admin.metrics import Metrics
from carousel.server.tracing.otlp import OtlpTracing
from carousel.server.tracing.tracing import EndedSequence, TracedRequest
from runtime.wire.perf_metrics import Stamp, TraceStamps
from tests.cpu.tracing.test_otlp_traces import NAMES, SAMPLED, answer
from tests.harness.http.http_front import CONFIG, http_front
from tests.harness.http.otlp_collector import otlp_collector
from tests.harness.ring.fake_ring import finish
from tests.harness.ring.launched import wait_until

MAX_BYTES = 10_000_000


class Taker(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
    def __init__(self) -> None:
        self.spans: list[Any] = []

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        for of_resource in request.resource_spans:
            for scope in of_resource.scope_spans:
                self.spans += scope.spans
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def taker() -> Iterator[tuple[Taker, int]]:
    server, taker = grpc.server(ThreadPoolExecutor(1)), Taker()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(taker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield taker, port
    server.stop(None)


@pytest.mark.parametrize("by_setting", [True, False])
def test_traces_go_over_grpc_where_the_environment_says_so(
    taker: tuple[Taker, int],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    *,
    by_setting: bool,
) -> None:
    collector, port = taker
    endpoint = f"http://127.0.0.1:{port}"
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    settings = {"otlp_traces_endpoint": endpoint} if by_setting else {}
    if not by_setting:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    with http_front(tmp_path_factory.mktemp("run"), answer, **settings) as front:
        front.http.post("/v1/completions", json={"prompt": "x"}, headers=SAMPLED).raise_for_status()
        wait_until(lambda: len(collector.spans) == 6, 10.0, "the spans")
    assert {span.trace_id.hex() for span in collector.spans} == {SAMPLED["traceparent"][3:35]}


def test_what_nobody_takes_has_bounded_memory(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3,000 requests with all the stamps that a sequence may have, and a collector that does not answer."""
    now = time.monotonic()
    stamps = [Stamp(name, now) for name in NAMES[:4]]
    stamps += [Stamp("chunk", now, number) for number in range(50)]
    trace = TraceStamps(bytes(25), (*stamps, *(Stamp(name, now) for name in NAMES[5:])))
    ended = EndedSequence(0, 0, msgspec.structs.replace(finish(), trace=trace))
    state = {"request_id": "r" * 64}
    scope = {"headers": [], "path": "/v1/completions", "method": "POST", "state": state}
    asked = TracedRequest(scope, [Submission("x")], now, "m")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "30")
    with otlp_collector() as collector:
        collector.delay_s = 20.0
        config = msgspec.structs.replace(CONFIG, otlp_traces_endpoint=collector.url)
        metrics = Metrics("m", tmp_path_factory.mktemp("metrics"))
        tracing = OtlpTracing(config, metrics)
        tracing.begin(asked).end([ended], None)  # what is made once
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(3000):
            tracing.begin(asked).end([ended], None)
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert 500_000 < after - before < MAX_BYTES
