"""Spans as bytes: a decoder that knows the protocol reads from them what was put in."""

from __future__ import annotations

import random
import string
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from carousel.server.tracing.otlp_encoding import (
    ERROR,
    SERVER,
    AttributeValue,
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
from runtime.wire.perf_metrics import Stamp
from tests.harness.http.otlp_collector import attributes_of

TRACE_ID, SPAN_ID, PARENT_ID = bytes(range(16)), bytes(range(8, 16)), b"p" * 8
NO_LIMITS = TraceLimits()
NUM_DRAWS = 200
NUMBERS = (0, 1, -1, 127, 128, 2**31, 2**63 - 1, -(2**63))
FLOATS = (0.0, -0.0, 5e-324, -1.5, 1e308, float("inf"), float("-inf"))
LETTERS = (
    "a",
    "Z",
    "\0",
    "\n",
    '"',
    "\x7f",
    "\x80",
    "é",
    "\u2028",
    "\ud7ff",
    "\ue000",
    "\uffff",
    "𐀀",
    "\U0010ffff",
)
"""Characters at both ends of each length in UTF-8, and those that have a meaning somewhere."""


def drawn_text(rng: random.Random) -> str:
    return "".join(rng.choices(LETTERS, k=rng.choice((0, 1, 2, 9, 130))))


def drawn_value(rng: random.Random) -> AttributeValue:
    kind = rng.randrange(5)
    if kind == 0:
        return drawn_text(rng)
    if kind == 1:
        return rng.random() < 0.5
    if kind == 2:
        return rng.choice((*NUMBERS, rng.randint(-(2**63), 2**63 - 1)))
    if kind == 3:
        return rng.choice((*FLOATS, rng.uniform(-1e6, 1e6)))
    return [drawn_text(rng) for _ in range(rng.randrange(4))]


def span_of(attributes: dict[str, Any], stamps: list[Stamp], limits: TraceLimits = NO_LIMITS) -> Any:
    """The span with these, as a collector reads it."""
    span = encode_span(
        encode_ids(TRACE_ID, SPAN_ID, PARENT_ID, encode_state("vendor=1")),
        encode_name("chat modèle", SERVER),
        1_700_000_000_000_000_001,
        1_700_000_000_000_000_002,
        encode_attributes(attributes, limits),
        encode_events(stamps, 5, limits),
        ERROR + encode_flags(is_remote=True),
    )
    data = RequestEncoder("carousel", {"service.name": "mine", "size": 3}, "schema").encode([span, span])
    (of_resource,) = ExportTraceServiceRequest.FromString(data).resource_spans
    assert attributes_of(of_resource.resource) == {"service.name": "mine", "size": 3}
    assert of_resource.schema_url == "schema"
    (scope,) = of_resource.scope_spans
    assert scope.scope.name == "carousel"
    first, second = scope.spans
    assert first == second
    return first


def test_attributes_of_each_kind_are_read_as_they_were() -> None:
    rng = random.Random(1)
    for _ in range(NUM_DRAWS):
        names = {
            "".join(rng.choices(string.printable, k=rng.randint(1, 12))) for _ in range(rng.randrange(7))
        }
        attributes = {name: drawn_value(rng) for name in names}
        read = attributes_of(span_of(attributes, []))
        assert read == attributes
        assert {key: type(value) for key, value in read.items()} == {
            key: type(value) for key, value in attributes.items()
        }


def test_events_are_read_as_they_were() -> None:
    rng = random.Random(2)
    for number in range(NUM_DRAWS):
        moments = [(rng.uniform(0.0, 1e6), rng.randrange(2**41)) for _ in range(number % 65)]
        span = span_of({}, [Stamp("retraction", at_s, value) for at_s, value in moments])
        read = [(event.name, event.time_unix_nano, attributes_of(event)) for event in span.events]
        assert read == [("retraction", round(at_s * 1e9) + 5, {"value": value}) for at_s, value in moments]


def test_what_else_a_span_has() -> None:
    span = span_of({}, [])
    assert (span.trace_id, span.span_id, span.parent_span_id) == (TRACE_ID, SPAN_ID, PARENT_ID)
    assert (span.name, span.kind, span.trace_state) == ("chat modèle", 2, "vendor=1")
    assert span.end_time_unix_nano - span.start_time_unix_nano == 1
    assert span.start_time_unix_nano == 1_700_000_000_000_000_001
    assert span.status.code == 2
    assert span.flags == 0x301


@pytest.mark.parametrize("is_root", [True, False])
def test_a_span_without_a_caller_has_no_parent(*, is_root: bool) -> None:
    parent = b"" if is_root else PARENT_ID
    ids = encode_ids(TRACE_ID, SPAN_ID, parent, b"")
    assert (PARENT_ID in ids) is not is_root


def test_limits_cut_values_and_leave_out_attributes_and_events() -> None:
    attributes = {"a": "long text", "b": ["long", "x"], "c": 10**9, "d": 1}
    stamps = [Stamp("chunk", float(at), at) for at in range(5)]
    span = span_of(attributes, stamps, TraceLimits(num_attributes=3, value_len=2, num_events=2))
    assert attributes_of(span) == {"a": "lo", "b": ["lo", "x"], "c": 10**9}
    assert [attributes_of(event)["value"] for event in span.events] == [3, 4]
    assert (span.dropped_attributes_count, span.dropped_events_count) == (1, 3)


def test_text_that_is_no_unicode_does_not_spoil_the_batch() -> None:
    assert attributes_of(span_of({"a": "x\ud800"}, [])) == {"a": "x?"}
