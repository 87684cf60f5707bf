"""Spans of a program that has a tracer: made by the client library, of what the ring has noted."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from carousel.client.async_ import AsyncClient
from carousel.client.sync import Client
from runtime.base.errors import RequestError
from runtime.wire.sampling_params import SamplingParams
from tests.cpu.tracing.test_otlp_traces import SAMPLED, answer
from tests.harness.ring.fake_ring import FakeRing, fake_ring

PLAIN = SamplingParams(max_tokens=4)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Spans that the program's tracer has exported."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return exporter


@pytest.fixture
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeRing]:
    with fake_ring(tmp_path_factory.mktemp("run"), answer) as ring:
        yield ring


def tree(spans: InMemorySpanExporter) -> tuple[ReadableSpan, list[ReadableSpan]]:
    """The request's span, and its phases in order."""
    finished = spans.get_finished_spans()
    (root,) = [span for span in finished if span.name == "generate"]
    assert root.context is not None
    children = [span for span in finished if span.parent and span.parent.span_id == root.context.span_id]
    return root, children


def test_a_request_is_a_span_below_the_callers_with_its_phases(
    ring: FakeRing, spans: InMemorySpanExporter
) -> None:
    with Client(ring.run_dir) as client, trace.get_tracer("program").start_as_current_span("own") as own:
        client.generate("x", PLAIN)
    root, children = tree(spans)
    assert root.parent is not None
    assert root.parent.span_id == own.get_span_context().span_id
    assert [span.name for span in children] == ["tokenize", "queue", "prefill", "decode", "deliver"]
    assert children[0].start_time == root.start_time
    assert children[-1].end_time == root.end_time
    for before, after in itertools.pairwise(children):
        assert before.end_time == after.start_time
    assert root.attributes is not None
    assert root.attributes["gen_ai.usage.input_tokens"] == 5
    assert root.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    (request,) = ring.requests
    assert request.trace is not None
    assert root.context is not None
    assert request.trace.context[16:24] == root.context.span_id.to_bytes(8, "big")


def test_two_sequences_read_by_an_event_loop(ring: FakeRing, spans: InMemorySpanExporter) -> None:
    async def read() -> None:
        async with AsyncClient(ring.run_dir) as client:
            async for _ in client.stream("x", SamplingParams(max_tokens=4, n=2)):
                pass

    asyncio.run(read())
    root, children = tree(spans)
    assert root.parent is None
    assert [span.name for span in children].count("decode") == 2


def test_a_refusal_and_a_departure_have_an_error(ring: FakeRing, spans: InMemorySpanExporter) -> None:
    with Client(ring.run_dir) as client:
        with pytest.raises(RequestError):
            client.generate("refuse", PLAIN)
        with pytest.raises(RequestError):
            client.generate("x", SamplingParams(max_tokens=-1))
        client.stream("x", PLAIN).close()
    kinds = [(span.attributes or {}).get("error.type") for span in spans.get_finished_spans()]
    assert kinds[0] == "invalid_value"
    assert kinds[1] is not None
    assert len(kinds) == 3


def test_who_names_a_trace_or_has_no_tracer_gets_no_span(
    ring: FakeRing, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(ring.run_dir) as client:
        client.generate("x", PLAIN, traceparent=SAMPLED["traceparent"])
        monkeypatch.setattr(trace, "get_tracer", trace.NoOpTracerProvider().get_tracer)
        client.generate("x", PLAIN)
    assert not spans.get_finished_spans()
    assert [request.trace is None for request in ring.requests] == [False, True]
