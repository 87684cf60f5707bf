"""Reading of a traceparent, and which HTTP requests are sampled by it."""

from __future__ import annotations

import pytest

from carousel.client.core.request.request_builder import build_request
from carousel.client.core.request.submission import RequestOptions, Submission
from carousel.client.tracing.trace_context import format_traceparent, parse_traceparent
from carousel.server.tracing.sampling import sampled_traceparent
from runtime.base.errors import InvalidRequest
from runtime.wire.handle import make_handle
from runtime.wire.perf_metrics import TraceStamps
from tests.harness.cases import for_each

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = f"00-{TRACE_ID}-{SPAN_ID}-01"
NOT_SAMPLED = f"00-{TRACE_ID}-{SPAN_ID}-00"


def test_a_traceparent_is_read_and_written() -> None:
    context = parse_traceparent(SAMPLED)
    assert context == bytes.fromhex(TRACE_ID + SPAN_ID + "01")
    assert format_traceparent(context) == SAMPLED
    assert parse_traceparent(f"01-{TRACE_ID}-{SPAN_ID}-01-more") == context, "a later version may have more"


@for_each(
    "text",
    [
        "",
        "x",
        SAMPLED.upper(),
        SAMPLED + "-more",
        f"ff-{TRACE_ID}-{SPAN_ID}-01",
        f"00-{'0' * 32}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"00-{TRACE_ID}-{SPAN_ID}-1",
        f"00-{TRACE_ID}-{SPAN_ID}-01\n",
    ],
)
def test_what_is_no_traceparent_counts_as_none(text: str) -> None:
    assert parse_traceparent(text) is None
    assert sampled_traceparent([(b"traceparent", text.encode())], 0.0) is None
    with pytest.raises(InvalidRequest, match="traceparent"):
        build_request(make_handle(1, 1), Submission("x", options=RequestOptions(traceparent=text)))


def test_who_asks_decides_and_for_the_others_a_share() -> None:
    def header(value: str) -> list[tuple[bytes, bytes]]:
        return [(b"host", b"x"), (b"traceparent", value.encode())]

    assert sampled_traceparent(header(SAMPLED), 0.0) == SAMPLED
    assert sampled_traceparent(header(NOT_SAMPLED), 1.0) is None
    assert sampled_traceparent([], 0.0) is None
    assert sampled_traceparent(header(SAMPLED) + header(SAMPLED), 0.0) is None
    drawn = {sampled_traceparent([], 1.0) for _ in range(20)}
    assert len(drawn) == 20
    assert all(each is not None and parse_traceparent(each) for each in drawn)
    share = sum(sampled_traceparent([], 0.25) is not None for _ in range(4000))
    assert 800 < share < 1200


def test_only_what_is_sampled_is_on_the_wire() -> None:
    def trace(traceparent: str | None) -> TraceStamps | None:
        options = RequestOptions(traceparent=traceparent)
        return build_request(make_handle(1, 1), Submission("x", options=options)).trace

    assert trace(SAMPLED) == TraceStamps(bytes.fromhex(TRACE_ID + SPAN_ID + "01"))
    assert trace(NOT_SAMPLED) is None
    assert trace(None) is None
