"""RequestSpan: span of a request and of its phases, if the caller's program has an OpenTelemetry tracer.
Nothing here imports OpenTelemetry: a program that has not imported it has no tracer. A request that names its
own trace (`traceparent`) gets no span here; the HTTP server makes the spans of its requests.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from carousel.client.tracing.phases import phases_of
from carousel.client.tracing.trace_context import SAMPLED, trace_for_wire
from runtime.wire.messages import Finish

TRACER = "carousel"


class RequestSpan:
    """Span of a request. It begins when the request is submitted, and is exported when it has ended. Any
    thread may end it, once.
    """

    def __init__(self, tracer: Any, span: Any, began_s: float, wall_offset_ns: int) -> None:
        """began_s: on CLOCK_MONOTONIC; wall_offset_ns converts it to time since 1970."""
        context = span.get_span_context()
        self.trace = trace_for_wire(f"00-{context.trace_id:032x}-{context.span_id:016x}-{SAMPLED:02x}")
        """Trace that the request carries."""
        self._tracer = tracer
        self._span = span
        self._began_s = began_s
        self._wall_offset_ns = wall_offset_ns
        self._turns = [True]
        """Token that is taken by the thread that ends the span."""

    def end(self, finishes: Sequence[Finish | None] = (), error: BaseException | None = None) -> None:
        """End the span. finishes: terminal parts of the request's sequences that have arrived."""
        try:
            self._turns.pop()
        except IndexError:
            return
        trace: Any = sys.modules["opentelemetry.trace"]
        span, end_s = self._span, time.monotonic()
        ended = [(index, finish) for index, finish in enumerate(finishes) if finish is not None]
        if ended:
            usages = [finish.usage for _, finish in ended]
            span.set_attribute("gen_ai.response.finish_reasons", [finish.reason for _, finish in ended])
            span.set_attribute("gen_ai.usage.input_tokens", usages[0].prompt_tokens)
            span.set_attribute("gen_ai.usage.output_tokens", sum(usage.completion_tokens for usage in usages))
        if error is not None:
            span.set_attribute("error.type", getattr(error, "code", "") or type(error).__name__)
            span.set_status(trace.StatusCode.ERROR)
        parent = trace.set_span_in_context(span)
        for index, finish in ended:
            stamps = () if finish.trace is None else finish.trace.stamps
            # Stamps of another machine's clock cannot be compared here.
            if stamps and self._began_s <= stamps[0].at_s <= end_s:
                for phase in phases_of(stamps, self._began_s, end_s):
                    child = self._tracer.start_span(
                        phase.name,
                        context=parent,
                        attributes={"carousel.sequence": index},
                        start_time=self._wall_ns(phase.start_s),
                    )
                    for stamp in phase.events:
                        child.add_event(stamp.name, {"value": stamp.value}, self._wall_ns(stamp.at_s))
                    child.end(self._wall_ns(phase.end_s))
        span.end(self._wall_ns(end_s))

    def _wall_ns(self, at_s: float) -> int:
        return _wall_ns(at_s, self._wall_offset_ns)


def _wall_ns(at_s: float, wall_offset_ns: int) -> int:
    return round(at_s * 1e9) + wall_offset_ns


def begin_span(operation: str) -> RequestSpan | None:
    """Begin the span of a request below the caller's; None if no tracer samples it."""
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    tracer, began_s = trace.get_tracer(TRACER), time.monotonic()
    wall_offset_ns = time.time_ns() - time.monotonic_ns()
    span = tracer.start_span(
        operation,
        kind=trace.SpanKind.CLIENT,
        attributes={"gen_ai.operation.name": operation},
        start_time=_wall_ns(began_s, wall_offset_ns),
    )
    return RequestSpan(tracer, span, began_s, wall_offset_ns) if span.is_recording() else None
