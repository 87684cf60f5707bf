"""OtlpTracing: traces of HTTP requests, sent to a collector by OpenTelemetry's SDK.

The only module that imports it. Sampling, resource, protocol, headers, certificates and the sizes of batches
are what OpenTelemetry's own variables (OTEL_*) say. Spans are made when a request has ended, of what its
sequences brought back, and wait in a bounded queue for a thread of the SDK: no request waits for a collector.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry import propagate, trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from carousel.client.core.request_builder import NUMBERS
from carousel.client.tracing.phases import RequestPhase, phases_of
from carousel.client.tracing.trace_context import SAMPLED
from carousel.server.admin.metrics import Metrics
from carousel.server.tracing.content import input_messages, output_messages
from carousel.server.tracing.tracing import EndedSequence, RequestTrace, TracedRequest, Tracing
from runtime.base.errors import RequestError
from runtime.settings.config import RuntimeConfig
from runtime.wire.sampling_params import SamplingParams

DEFAULT_QUEUE, DEFAULT_BATCH = 768, 256
"""Spans that wait, and that are sent at once: together 9 MB if each has all the stamps that there may be."""
PLAIN = SamplingParams()
OPERATIONS = {"/v1/chat/completions": "chat", "/v1/embeddings": "embeddings"}


def make_exporter(config: RuntimeConfig, environment: Mapping[str, str] = os.environ) -> SpanExporter:
    """OTLP over HTTP/protobuf, or over gRPC where OpenTelemetry's variables say so."""
    protocol = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environment.get(
        "OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"
    )
    endpoint = config.otlp_traces_endpoint or None
    exporter: SpanExporter
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        exporter = GrpcExporter(endpoint=endpoint)
    else:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        exporter = HttpExporter(endpoint=endpoint)
    return exporter


class CountingExporter(SpanExporter):
    """Passes on to another one, and counts what became of it."""

    def __init__(self, inner: SpanExporter, metrics: Metrics) -> None:
        self._inner = inner
        self._metrics = metrics
        self.num_tried = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.num_tried += len(spans)
        result = self._inner.export(spans)
        has_taken = result is SpanExportResult.SUCCESS
        counter = self._metrics.spans_exported if has_taken else self._metrics.spans_failed
        counter.inc(len(spans))
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()


class CountingProcessor(BatchSpanProcessor):
    """Drops what its queue has no room for, and counts that."""

    def __init__(self, exporter: CountingExporter, metrics: Metrics) -> None:
        self._room = int(os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE") or DEFAULT_QUEUE)
        batch = int(os.environ.get("OTEL_BSP_MAX_EXPORT_BATCH_SIZE") or min(DEFAULT_BATCH, self._room))
        super().__init__(exporter, max_queue_size=self._room, max_export_batch_size=batch)
        self._exporter = exporter
        self._metrics = metrics
        self._num_taken = 0

    def on_end(self, span: ReadableSpan) -> None:
        if self._num_taken - self._exporter.num_tried >= self._room:
            self._metrics.spans_dropped.inc()
            return
        self._num_taken += 1
        super().on_end(span)


class OtlpTracing(Tracing):
    def __init__(self, config: RuntimeConfig, metrics: Metrics) -> None:
        super().__init__()
        self._has_content = config.trace_content
        environment = os.environ
        names = environment.get("OTEL_SERVICE_NAME", "") + environment.get("OTEL_RESOURCE_ATTRIBUTES", "")
        is_named = bool(environment.get("OTEL_SERVICE_NAME")) or "service.name=" in names
        resource = Resource.create({} if is_named else {"service.name": "carousel"})
        exporter = CountingExporter(make_exporter(config), metrics)
        self._processor = CountingProcessor(exporter, metrics)
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(self._processor)
        self._tracer = provider.get_tracer("carousel")

    def begin(self, asked: TracedRequest) -> RequestTrace:
        headers: dict[str, str] = {}
        for name, value in asked.scope["headers"]:
            if name in (b"traceparent", b"tracestate", b"baggage"):
                key, text = name.decode(), value.decode("latin-1")
                headers[key] = f"{headers[key]},{text}" if key in headers else text
        wall_offset_ns = time.time_ns() - time.monotonic_ns()
        operation = OPERATIONS.get(asked.scope["path"], "text_completion")
        root = self._tracer.start_span(
            f"{operation} {asked.model}",
            context=propagate.extract(headers),
            kind=trace.SpanKind.SERVER,
            attributes=_attributes(asked, operation),
            start_time=round(asked.received_s * 1e9) + wall_offset_ns,
        )
        if not root.get_span_context().trace_flags.sampled:
            return RequestTrace(None)
        if self._has_content and (messages := input_messages(asked.submissions)):
            root.set_attribute("gen_ai.input.messages", messages)
        return OtlpRequestTrace(self._tracer, root, asked, wall_offset_ns, has_content=self._has_content)

    def close(self, timeout_s: float) -> None:
        # In a thread that the end of the process does not wait for: the collector may not answer.
        timeout_ms = round(timeout_s * 1000)
        flush = threading.Thread(target=self._processor.force_flush, args=(timeout_ms,), daemon=True)
        flush.start()
        flush.join(timeout_s)


class OtlpRequestTrace(RequestTrace):
    def __init__(
        self,
        tracer: trace.Tracer,
        root: trace.Span,
        asked: TracedRequest,
        wall_offset_ns: int,
        *,
        has_content: bool,
    ) -> None:
        context = root.get_span_context()
        super().__init__(f"00-{context.trace_id:032x}-{context.span_id:016x}-{SAMPLED:02x}")
        self.has_content = has_content
        self._tracer = tracer
        self._root = root
        self._asked = asked
        self._wall_offset_ns = wall_offset_ns

    def end(self, sequences: Sequence[EndedSequence], error: BaseException | None) -> None:
        root, end_s = self._root, time.monotonic()
        usages = [each.finish.usage for each in sequences]
        # The sequences of a prompt share it.
        prompts = {each.prompt: each.finish.usage.prompt_tokens for each in sequences}
        root.set_attributes(
            {
                "gen_ai.response.model": self._asked.model,
                "gen_ai.response.finish_reasons": [each.finish.reason for each in sequences],
                "gen_ai.usage.input_tokens": sum(prompts.values()),
                "gen_ai.usage.output_tokens": sum(usage.completion_tokens for usage in usages),
            }
        )
        if self.has_content and sequences:
            root.set_attribute("gen_ai.output.messages", output_messages(sequences))
        if error is not None:
            kind = error.code if isinstance(error, RequestError) and error.code else type(error).__name__
            root.set_attribute("error.type", kind)
            root.set_status(trace.StatusCode.ERROR)
        parent = trace.set_span_in_context(root)
        for each in sequences:
            if each.finish.trace is not None:
                for phase in phases_of(each.finish.trace.stamps, self._asked.received_s, end_s):
                    self._add(phase, each, parent)
        root.end(self._wall_ns(end_s))

    def _add(self, phase: RequestPhase, sequence: EndedSequence, parent: Any) -> None:
        span = self._tracer.start_span(
            phase.name,
            context=parent,
            attributes={"carousel.prompt": sequence.prompt, "carousel.sequence": sequence.index},
            start_time=self._wall_ns(phase.start_s),
        )
        for stamp in phase.events:
            span.add_event(stamp.name, {"value": stamp.value}, self._wall_ns(stamp.at_s))
        span.end(self._wall_ns(phase.end_s))

    def _wall_ns(self, at_s: float) -> int:
        return round(at_s * 1e9) + self._wall_offset_ns


def _attributes(asked: TracedRequest, operation: str) -> dict[str, Any]:
    """Return what is asked for, in the names of OpenTelemetry's conventions for generative models."""
    sampling = asked.submissions[0].sampling
    given = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "carousel",
        "gen_ai.request.model": asked.model,
        "gen_ai.request.choice.count": sampling.n,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "http.request.method": asked.scope["method"],
        "url.path": asked.scope["path"],
        "carousel.request_id": asked.scope["state"]["request_id"],
        "carousel.num_prompts": len(asked.submissions),
    }
    for parameter in NUMBERS:
        if (value := getattr(sampling, parameter.name)) != getattr(PLAIN, parameter.name):
            given[f"gen_ai.request.{parameter.name}"] = value
    return {name: value for name, value in given.items() if value is not None}
