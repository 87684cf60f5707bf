"""Tracing: decides which HTTP requests are sampled for traces. It sends none itself; OtlpTracing, which
extends it, sends them when their requests end.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from msgspec import Struct
from starlette.types import Scope

from carousel.client.core.request.submission import Submission
from carousel.server.tracing.sampling import sampled_traceparent
from runtime.settings.config import RuntimeConfig
from runtime.wire.messages import Finish

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


@dataclass(frozen=True, slots=True)
class EndedSequence:
    """Ended sequence, with the number of its prompt in the request."""

    prompt: int
    index: int
    finish: Finish
    text: str = ""
    """Output of the sequence; empty unless the trace has content."""


class RequestTrace:
    """Trace of one HTTP request."""

    def __init__(self, traceparent: str | None) -> None:
        self.traceparent = traceparent
        """Traceparent of the request's sequences; None if it is not sampled."""
        self.has_content = False
        """True if the trace has the texts of prompts and outputs."""

    def end(self, sequences: Sequence[EndedSequence], error: BaseException | None) -> None:
        """End the trace, after the answer has been sent or the request has failed with `error`."""


class TracedRequest(Struct, frozen=True):
    """Request as a trace describes it. Prompts are used only if traces have content."""

    scope: Scope
    submissions: Sequence[Submission]
    """Submissions of the request, one for each prompt, which differ only in prompt and label."""
    received_s: float
    """Time of arrival in seconds of CLOCK_MONOTONIC."""
    model: str


class Tracing:
    """Sampling and traces of one HTTP process."""

    def __init__(self, sample_rate: float = 0.0) -> None:
        self._sample_rate = sample_rate

    def begin(self, asked: TracedRequest) -> RequestTrace:
        return RequestTrace(sampled_traceparent(asked.scope["headers"], self._sample_rate))

    def close(self, timeout_s: float) -> None:
        """Send the waiting traces, as far as the time allows."""


def wants_traces(config: RuntimeConfig) -> bool:
    """Return True if the settings or OpenTelemetry's variables name a collector."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    if os.environ.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return False
    return bool(config.otlp_traces_endpoint or any(os.environ.get(name) for name in ENDPOINTS))


def has_opentelemetry() -> bool:
    names = ("opentelemetry", "opentelemetry.sdk", "requests")
    return all(find_spec(name) is not None for name in names)  # a parent package before its modules
