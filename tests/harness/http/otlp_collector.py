"""Collector of traces: accepts OTLP over HTTP/protobuf, or is slow, or answers with an error."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.harness.ring.fake_ring import WAIT_S


class Collector:
    def __init__(self) -> None:
        self.status = 200
        self.statuses: list[int] = []
        """Those of the next answers; afterwards `status`."""
        self.retry_after = ""
        self.headers: list[Any] = []
        """Those of the requests so far."""
        self.delay_s = 0.0
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []
        self.num_posts = 0
        self._changed = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                time.sleep(collector.delay_s)
                assert self.headers["Content-Type"] == "application/x-protobuf"
                collector.headers.append(self.headers)
                status = collector.statuses.pop(0) if collector.statuses else collector.status
                collector.take(body, status)
                self.send_response(status)
                if collector.retry_after:
                    self.send_header("Retry-After", collector.retry_after)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Says nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def take(self, body: bytes, status: int) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        with self._changed:
            self.num_posts += 1
            if status == 200:
                for of_resource in request.resource_spans:
                    self.resources.append(attributes_of(of_resource.resource))
                    for scope in of_resource.scope_spans:
                        self.spans += scope.spans
            self._changed.notify_all()

    def wait_for_roots(self, number: int) -> list[Any]:
        """Spans of kind server, when there are so many."""

        def roots() -> list[Any]:
            return [span for span in self.spans if span.kind == 2]

        with self._changed:
            assert self._changed.wait_for(lambda: len(roots()) >= number, WAIT_S), "no traces have come"
            return roots()

    def children_of(self, root: Any) -> list[Any]:
        return [span for span in self.spans if span.parent_span_id == root.span_id]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def attributes_of(span: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for each in span.attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        values[each.key] = [one.string_value for one in value.values] if kind == "array_value" else value
    return values


@contextmanager
def otlp_collector() -> Iterator[Collector]:
    collector = Collector()
    try:
        yield collector
    finally:
        collector.close()
