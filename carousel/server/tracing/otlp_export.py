"""SpanExport: bounded queue of encoded spans, and the thread that sends them to a collector over HTTP
(HttpSender) or gRPC (`make_grpc_sender`). No request waits for it. Lost spans are counted.

OpenTelemetry's own variables (OTEL_EXPORTER_OTLP_*, OTEL_BSP_*) set the address and the protocol.
"""

from __future__ import annotations

import gzip
import logging
import os
import random
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from itertools import count
from typing import Any, Protocol

import requests
from opentelemetry.util.re import parse_env_headers

from carousel.server.admin.metrics import Metrics
from runtime.base.errors import ConfigError

DEFAULT_QUEUE, DEFAULT_BATCH = 768, 256
"""Maximum numbers of waiting spans and of spans in one message. If each has the maximum number of stamps,
these are some megabytes.
"""
DEFAULT_DELAY_MS = 5000
DEFAULT_TIMEOUT_S = 10.0
LOCAL = "http://localhost:4318"
RETRIED = {408, 429, 502, 503, 504}
"""Statuses after which a collector may accept the same message later."""
PROVIDERS = "opentelemetry_otlp_credential_provider"
COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "none": lambda data: data,
    "gzip": gzip.compress,
    "deflate": zlib.compress,
}

logger = logging.getLogger(__name__)


class Sender(Protocol):
    """Connection to a collector."""

    def send(self, spans: Sequence[bytes]) -> bool:
        """Send spans, and return True if the collector has accepted them. Waits for it, with a time limit."""

    def close(self) -> None:
        """Stop retrying. Called by another thread."""


class SpanExport:
    def __init__(self, sender: Sender, metrics: Metrics, environment: Mapping[str, str] = os.environ) -> None:
        """Read the variables of the queue. Raises ConfigError for values that are no positive integers."""
        self._sender = sender
        self._metrics = metrics
        self._room = _count(environment, "OTEL_BSP_MAX_QUEUE_SIZE", DEFAULT_QUEUE)
        batch = _count(environment, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", min(DEFAULT_BATCH, self._room))
        self._batch = min(batch, self._room)
        self._delay_s = _count(environment, "OTEL_BSP_SCHEDULE_DELAY", DEFAULT_DELAY_MS) / 1000
        self._waiting: deque[bytes] = deque()
        self._wake = threading.Event()
        self._is_closing = False
        self._is_failing = False
        self._thread = threading.Thread(target=self._run, name="trace export", daemon=True)
        self._thread.start()

    @property
    def num_free(self) -> int:
        """Number of free places in the queue."""
        return max(0, self._room - len(self._waiting))

    def put(self, spans: Sequence[bytes], num_dropped: int = 0) -> None:
        """Queue spans as far as there is room. `num_dropped` is the number of spans that were not encoded."""
        num_free = self.num_free
        self._waiting.extend(spans[:num_free])
        num_dropped += max(0, len(spans) - num_free)
        if num_dropped:
            self._metrics.spans_dropped.inc(num_dropped)
        if len(self._waiting) >= self._batch and not self._wake.is_set():
            self._wake.set()

    def close(self, timeout_s: float) -> None:
        """Send the waiting spans, as far as the time allows. If the collector does not answer, the process
        ends without waiting for the thread.
        """
        self._is_closing = True
        self._wake.set()
        self._thread.join(timeout_s)
        self._sender.close()

    def _run(self) -> None:
        while not self._is_closing:
            self._wake.wait(self._delay_s)
            self._wake.clear()
            self._send_batch()
            while len(self._waiting) >= self._batch:
                self._send_batch()
        while self._waiting:
            self._send_batch()

    def _send_batch(self) -> None:
        waiting = self._waiting
        spans = [waiting.popleft() for _ in range(min(self._batch, len(waiting)))]
        if not spans:
            return
        try:
            has_taken = self._sender.send(spans)
        except Exception:
            logger.exception("traces cannot be sent")
            has_taken = False
        counter = self._metrics.spans_exported if has_taken else self._metrics.spans_failed
        counter.inc(len(spans))
        if self._is_failing == has_taken:
            self._is_failing = not has_taken
            if has_taken:
                logger.info("the collector takes traces again")
            else:
                logger.warning("the collector does not take traces: they are lost and counted")


class HttpSender:
    """Sends OTLP over HTTP/protobuf, on a persistent connection."""

    def __init__(
        self,
        encode: Callable[[Sequence[bytes]], bytes],
        endpoint: str,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """Read the variables. `endpoint` replaces OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, unless it is empty.
        Raises ConfigError.
        """

        def said(name: str) -> str:
            of_traces = environment.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}")
            return of_traces or environment.get(f"OTEL_EXPORTER_OTLP_{name}", "")

        base = environment.get("OTEL_EXPORTER_OTLP_ENDPOINT") or LOCAL
        of_traces = endpoint or environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
        self._url = of_traces or f"{base.rstrip('/')}/v1/traces"
        self._encode = encode
        self._timeout_s = _seconds("OTEL_EXPORTER_OTLP_TIMEOUT", said("TIMEOUT"))
        compression = said("COMPRESSION").strip().lower() or "none"
        if compression not in COMPRESSIONS:
            raise ConfigError(
                f"OTEL_EXPORTER_OTLP_COMPRESSION must be none, gzip or deflate, got {compression:.50}"
            )
        self._compress = COMPRESSIONS[compression]
        self._session = _session(environment)
        self._session.headers.update({"User-Agent": "carousel", "Content-Type": "application/x-protobuf"})
        if compression != "none":
            self._session.headers["Content-Encoding"] = compression
        self._session.headers.update(parse_env_headers(said("HEADERS"), liberal=True))
        self._session.verify = said("CERTIFICATE") or self._session.verify
        if certificate := said("CLIENT_CERTIFICATE"):
            key = said("CLIENT_KEY")
            self._session.cert = (certificate, key) if key else certificate
        self._closed = threading.Event()

    def send(self, spans: Sequence[bytes]) -> bool:
        data = self._compress(self._encode(spans))
        deadline_s = time.monotonic() + self._timeout_s
        for attempt in count():
            wait_s = 2**attempt * random.uniform(0.8, 1.2)
            try:
                left_s = max(0.001, deadline_s - time.monotonic())
                response = self._session.post(self._url, data=data, timeout=left_s)
            except requests.ConnectionError:
                pass
            except requests.RequestException:
                return False
            else:
                if response.ok:
                    return True
                if response.status_code not in RETRIED:
                    return False
                asked_for = response.headers.get("Retry-After", "")
                wait_s = float(asked_for) if asked_for.isdecimal() else wait_s
            if time.monotonic() + wait_s > deadline_s or self._closed.wait(wait_s):
                break
        return False

    def close(self) -> None:
        self._closed.set()


def make_grpc_sender(encode: Callable[[Sequence[bytes]], bytes], endpoint: str) -> Sender:
    """Return a sender of OTLP over gRPC: OpenTelemetry's own exporter, with requests encoded by `encode`."""
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    from opentelemetry.sdk.trace.export import SpanExportResult

    class GrpcSender(OTLPSpanExporter):  # type: ignore[misc]
        def _translate_data(self, data: Any) -> Any:
            return ExportTraceServiceRequest.FromString(encode(data))

        def send(self, spans: Sequence[bytes]) -> bool:
            result: object = self.export(spans)
            return result is SpanExportResult.SUCCESS

        def close(self) -> None:
            self.shutdown()

    sender: Sender = GrpcSender(endpoint=endpoint or None)
    return sender


def make_sender(
    encode: Callable[[Sequence[bytes]], bytes], endpoint: str, environment: Mapping[str, str] = os.environ
) -> Sender:
    """Return a sender over HTTP/protobuf, or gRPC if OpenTelemetry's variables say so. Raises ConfigError."""
    name = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
    protocol = environment.get(name) or environment.get("OTEL_EXPORTER_OTLP_PROTOCOL") or "http/protobuf"
    if protocol not in ("grpc", "http/protobuf"):
        raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL must be http/protobuf or grpc, got {protocol:.50}")
    return (
        make_grpc_sender(encode, endpoint)
        if protocol == "grpc"
        else HttpSender(encode, endpoint, environment)
    )


def _session(environment: Mapping[str, str]) -> requests.Session:
    """Return a new session, or that of the named credential provider. Raises ConfigError."""
    kind = "CREDENTIAL_PROVIDER"
    of_traces = environment.get(f"OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_{kind}")
    name = of_traces or environment.get(f"OTEL_PYTHON_EXPORTER_OTLP_HTTP_{kind}")
    if not name:
        return requests.Session()
    found = list(entry_points(group=PROVIDERS, name=name))
    if not found:
        raise ConfigError(f"OTEL_PYTHON_EXPORTER_OTLP_HTTP_{kind}: no provider {name:.50} is installed")
    session = found[0].load()()
    assert isinstance(session, requests.Session)
    return session


def _count(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name) or str(default)
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"{name} must be a whole number above 0, got {text:.50}")
    return int(text)


def _seconds(name: str, text: str) -> float:
    try:
        seconds = float(text or DEFAULT_TIMEOUT_S)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ConfigError(f"{name} must be a number of seconds above 0, got {text:.50}")
    return seconds
