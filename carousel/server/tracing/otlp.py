"""OtlpTracing: traces of HTTP requests for a collector.

OpenTelemetry's SDK decides which requests are sampled and which attributes the process has, by its own
variables (OTEL_*). When a request has ended, spans are encoded from the stamps of its sequences
(`otlp_encoding`). They wait in a bounded queue for a thread that sends them (`otlp_export`), so no request
waits for a collector.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

from msgspec import structs
from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider

from carousel.client.core.request.sampling_forms import NUMBERS
from carousel.client.tracing.phases import RequestPhase, phases_of
from carousel.client.tracing.trace_context import SAMPLED
from carousel.server.admin.metrics import Metrics
from carousel.server.http.errors import MESSAGES
from carousel.server.tracing.content import input_messages, output_messages
from carousel.server.tracing.otlp_encoding import (
    ERROR,
    INTERNAL,
    SERVER,
    AttributeValue,
    Encoded,
    RequestEncoder,
    TraceLimits,
    encode_attributes,
    encode_events,
    encode_flags,
    encode_ids,
    encode_name,
    encode_span,
    encode_state,
)
from carousel.server.tracing.otlp_export import SpanExport, make_sender
from carousel.server.tracing.tracing import EndedSequence, RequestTrace, TracedRequest, Tracing
from runtime.base.errors import RequestError
from runtime.settings.config import RuntimeConfig
from runtime.wire.sampling_params import SamplingParams

PLAIN = SamplingParams()
CHAT_PATHS = ("/v1/chat/completions", "/v1/responses", MESSAGES)
CARRIED = (b"traceparent", b"tracestate")
"""Headers of a caller's span. `baggage` is not read: no span has it, and the SDK takes up to 50 ms for
8 KB of it.
"""
LOGGER_OF_HEADERS = "opentelemetry.trace"
PHASE_NAMES = {
    name: encode_name(name, INTERNAL) for name in ("tokenize", "queue", "prefill", "decode", "deliver")
}
PHASE_END, SPAN_ID_BYTES = encode_flags(is_remote=False), 8


class OtlpTracing(Tracing):
    def __init__(self, config: RuntimeConfig, metrics: Metrics) -> None:
        """Read OpenTelemetry's variables. Raises ConfigError for invalid values."""
        super().__init__()
        # Its warnings repeat what callers send, one or more for each request.
        logging.getLogger(LOGGER_OF_HEADERS).setLevel(logging.ERROR)
        self.has_content = config.trace_content
        environment = os.environ
        names = environment.get("OTEL_SERVICE_NAME", "") + environment.get("OTEL_RESOURCE_ATTRIBUTES", "")
        is_named = bool(environment.get("OTEL_SERVICE_NAME")) or "service.name=" in names
        resource = Resource.create({} if is_named else {"service.name": "carousel"})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._sampler, self._new_ids = provider.sampler, provider.id_generator
        given = SpanLimits()
        self.limits = TraceLimits(
            given.max_span_attributes, given.max_span_attribute_length, given.max_events
        )
        encoder = RequestEncoder("carousel", provider.resource.attributes, provider.resource.schema_url)
        self.export = SpanExport(make_sender(encoder.encode, config.otlp_traces_endpoint), metrics)

    def begin(self, asked: TracedRequest) -> RequestTrace:
        carried: dict[str, str] = {}
        for name, value in asked.scope["headers"]:
            if name in CARRIED:
                key, text = name.decode(), value.decode("latin-1")
                carried[key] = f"{carried[key]},{text}" if key in carried else text
        context = propagate.extract(carried, Context()) if carried else Context()
        parent = trace.get_current_span(context).get_span_context()
        trace_id = parent.trace_id if parent.is_valid else self._new_ids.generate_trace_id()
        operation = _operation(asked)
        attributes = _attributes(asked, operation)
        result = self._sampler.should_sample(
            context,
            trace_id,
            f"{operation} {asked.model}",
            trace.SpanKind.SERVER,
            attributes,
        )
        if not result.decision.is_sampled():
            return RequestTrace(None)
        if self.has_content and (messages := input_messages(asked.submissions)):
            attributes["gen_ai.input.messages"] = messages
        state = result.trace_state.to_header() if result.trace_state else ""
        given = cast("Mapping[str, AttributeValue]", result.attributes or {})
        return OtlpRequestTrace(
            self, asked, _Place(parent, trace_id, state), operation, {**attributes, **given}
        )

    def close(self, timeout_s: float) -> None:
        self.export.close(timeout_s)


class _Place(NamedTuple):
    """Position of a request in its trace."""

    parent: trace.SpanContext
    """Span of the caller; invalid if there is none."""
    trace_id: int
    tracestate: str


class OtlpRequestTrace(RequestTrace):
    def __init__(
        self,
        tracing: OtlpTracing,
        asked: TracedRequest,
        place: _Place,
        operation: str,
        attributes: dict[str, AttributeValue],
    ) -> None:
        parent = place.parent
        self._trace_id = place.trace_id.to_bytes(16, "big")
        self._span_id = random.randbytes(SPAN_ID_BYTES)
        super().__init__(f"00-{self._trace_id.hex()}-{self._span_id.hex()}-{SAMPLED:02x}")
        self.has_content = tracing.has_content
        self._tracing = tracing
        # Without their prompts, which nobody needs any more.
        self._asked = structs.replace(asked, submissions=())
        self._parent_id = parent.span_id.to_bytes(SPAN_ID_BYTES, "big") if parent.is_valid else b""
        self._state = encode_state(place.tracestate)
        self._name = encode_name(f"{operation} {asked.model}", SERVER)
        self._attributes = attributes
        self._wall_offset_ns = time.time_ns() - time.monotonic_ns()

    def end(self, sequences: Sequence[EndedSequence], error: BaseException | None) -> None:
        end_s = time.monotonic()
        spans, num_dropped = [self._root(sequences, error, end_s)], 0
        num_free = self._tracing.export.num_free
        for each in sequences:
            if each.finish.trace is not None:
                about = self._encoded({"carousel.prompt": each.prompt, "carousel.sequence": each.index})
                for phase in phases_of(each.finish.trace.stamps, self._asked.received_s, end_s):
                    if len(spans) < num_free:
                        spans.append(self._phase(phase, about))
                    else:
                        num_dropped += 1
        self._tracing.export.put(spans, num_dropped)

    def _root(self, sequences: Sequence[EndedSequence], error: BaseException | None, end_s: float) -> bytes:
        asked, attributes = self._asked, self._attributes
        # The sequences of a prompt share it.
        prompts = {each.prompt: each.finish.usage.prompt_tokens for each in sequences}
        attributes["gen_ai.response.model"] = asked.model
        attributes["gen_ai.response.finish_reasons"] = [each.finish.reason for each in sequences]
        attributes["gen_ai.usage.input_tokens"] = sum(prompts.values())
        attributes["gen_ai.usage.output_tokens"] = sum(
            each.finish.usage.completion_tokens for each in sequences
        )
        if self.has_content and sequences:
            attributes["gen_ai.output.messages"] = output_messages(sequences)
        if error is not None:
            kind = error.code if isinstance(error, RequestError) and error.code else type(error).__name__
            attributes["error.type"] = kind
        return encode_span(
            encode_ids(self._trace_id, self._span_id, self._parent_id, self._state),
            self._name,
            self._wall_ns(asked.received_s),
            self._wall_ns(end_s),
            self._encoded(attributes),
            Encoded(b""),
            (b"" if error is None else ERROR) + encode_flags(is_remote=bool(self._parent_id)),
        )

    def _phase(self, phase: RequestPhase, about: Encoded) -> bytes:
        return encode_span(
            encode_ids(self._trace_id, random.randbytes(SPAN_ID_BYTES), self._span_id, self._state),
            PHASE_NAMES[phase.name],
            self._wall_ns(phase.start_s),
            self._wall_ns(phase.end_s),
            about,
            encode_events(phase.events, self._wall_offset_ns, self._tracing.limits),
            PHASE_END,
        )

    def _encoded(self, attributes: Mapping[str, AttributeValue]) -> Encoded:
        return encode_attributes(attributes, self._tracing.limits)

    def _wall_ns(self, at_s: float) -> int:
        return round(at_s * 1e9) + self._wall_offset_ns


def _operation(asked: TracedRequest) -> str:
    """Return the name of a request's operation, by OpenTelemetry's conventions."""
    if asked.submissions[0].options.get("task") == "embed":
        return "embeddings"
    return "chat" if asked.scope["path"] in CHAT_PATHS else "text_completion"


def _attributes(asked: TracedRequest, operation: str) -> dict[str, AttributeValue]:
    """Return a request's attributes, named by OpenTelemetry's conventions for generative models."""
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
