"""How traces go out: over gRPC, and in bounded memory where nobody takes them."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import grpc
import msgspec
import pytest
import requests
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from carousel.client.core.request.submission import Submission
from carousel.server.admin.metrics import Metrics
from carousel.server.tracing import otlp_export
from carousel.server.tracing.otlp import OtlpTracing
from carousel.server.tracing.otlp_encoding import (
    INTERNAL,
    Encoded,
    RequestEncoder,
    encode_ids,
    encode_name,
    encode_span,
)
from carousel.server.tracing.otlp_export import SpanExport, make_sender
from carousel.server.tracing.tracing import EndedSequence, TracedRequest
from runtime.base.errors import ConfigError
from runtime.wire.perf_metrics import Stamp, TraceStamps
from tests.cpu.tracing.test_otlp_traces import NAMES, SAMPLED, answer
from tests.harness.http.http_front import CONFIG, http_front
from tests.harness.http.otlp_collector import Collector, otlp_collector
from tests.harness.ring.fake_ring import finish
from tests.harness.ring.launched import SLACK, wait_until

MAX_BYTES = 10_000_000
ENCODER = RequestEncoder("carousel", {"service.name": "mine"}, "")
NOTHING = Encoded(b"")
SPAN = encode_span(
    encode_ids(b"t" * 16, b"s" * 8, b"", b""), encode_name("one", INTERNAL), 1, 2, NOTHING, NOTHING, b""
)


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


def collector_settings(collector: Collector, **more: str) -> dict[str, str]:
    base = collector.url.removesuffix("/v1/traces")
    return {"OTEL_EXPORTER_OTLP_ENDPOINT": f"{base}/", "OTEL_EXPORTER_OTLP_TIMEOUT": "10", **more}


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_variables_say_where_to_send_and_how(compression: str) -> None:
    with otlp_collector() as collector:
        given = {
            "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip" if compression == "none" else "none",
            "OTEL_EXPORTER_OTLP_TRACES_COMPRESSION": compression,
            "OTEL_EXPORTER_OTLP_HEADERS": "api-key=a%20b,x-other=c",
        }
        sender = make_sender(ENCODER.encode, "", collector_settings(collector, **given))
        assert sender.send([SPAN, SPAN])
        assert [span.name for span in collector.spans] == ["one", "one"]
        assert collector.resources == [{"service.name": "mine"}]
        (headers,) = collector.headers
        assert (headers["api-key"], headers["x-other"]) == ("a b", "c")
        assert headers["Content-Encoding"] == (None if compression == "none" else compression)


def test_what_a_collector_may_take_later_is_sent_again_and_all_else_is_not() -> None:
    with otlp_collector() as collector:
        sender = make_sender(ENCODER.encode, "", collector_settings(collector))
        collector.status = 400
        assert not sender.send([SPAN])
        assert collector.num_posts == 1
        collector.statuses = [503, 200]
        assert sender.send([SPAN])
        assert collector.num_posts == 3
        collector.statuses = [503] * 9
        collector.retry_after = "60"
        started = time.monotonic()
        assert not sender.send([SPAN])
        assert time.monotonic() - started < 5.0 * SLACK, "nobody waits for longer than the limit"


def test_a_credential_provider_makes_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    session = requests.Session()
    session.headers["authorization"] = "by the provider"
    entry = SimpleNamespace(load=lambda: lambda: session)
    monkeypatch.setattr(otlp_export, "entry_points", lambda group, name: [entry] if name == "mine" else [])
    variable = "OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER"
    with otlp_collector() as collector:
        assert make_sender(ENCODER.encode, collector.url, {variable: "mine"}).send([SPAN])
        assert collector.headers[0]["authorization"] == "by the provider"
    with pytest.raises(ConfigError, match="no provider other"):
        make_sender(ENCODER.encode, "", {variable: "other"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zstd"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "0"),
    ],
)
def test_what_a_variable_cannot_mean_is_refused_by_its_name(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        make_sender(ENCODER.encode, "", {name: value})


def test_a_queue_takes_whole_numbers_and_no_more_spans_than_it_has_room_for(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics, dropped = Metrics("m", tmp_path_factory.mktemp("metrics")), list[int]()
    monkeypatch.setattr(metrics, "spans_dropped", SimpleNamespace(inc=dropped.append))
    with otlp_collector() as collector:
        sender = make_sender(ENCODER.encode, collector.url, {})
        with pytest.raises(ConfigError, match="OTEL_BSP_MAX_QUEUE_SIZE"):
            SpanExport(sender, metrics, {"OTEL_BSP_MAX_QUEUE_SIZE": "-1"})
        sizes = {"OTEL_BSP_MAX_QUEUE_SIZE": "5", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "5"}
        export = SpanExport(sender, metrics, sizes)
        export.put([SPAN] * 3)
        assert export.num_free == 2
        export.close(5.0)
        assert len(collector.spans) == 3
        export.put([SPAN] * 7, num_dropped=2)
        assert sum(dropped) == 2 + 7 - 5


def test_what_nobody_takes_has_bounded_memory(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3,000 requests with all the stamps that a sequence may have, and a collector that does not answer."""
    now = time.monotonic()
    stamps = [Stamp(name, now) for name in NAMES[:4]]
    stamps += [Stamp("chunk", now, 1000 * number) for number in range(50)]
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
    assert 200_000 < after - before < MAX_BYTES
