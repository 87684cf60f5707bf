"""W3C trace context, as in a caller's `traceparent`."""

from __future__ import annotations

import re

from runtime.base.errors import InvalidRequest
from runtime.wire.perf_metrics import TraceStamps

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
SAMPLED = 1


def parse_traceparent(text: str) -> bytes | None:
    """Return the packed trace context of a traceparent; None if it is invalid by W3C's rules."""
    found = _TRACEPARENT.fullmatch(text)
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    if version == "ff" or (version == "00" and rest) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return bytes.fromhex(trace_id + span_id + flags)


def format_traceparent(context: bytes) -> str:
    return f"00-{context[:16].hex()}-{context[16:24].hex()}-{context[24]:02x}"


def trace_for_wire(traceparent: object) -> TraceStamps | None:
    """Return the trace that a request with this option carries; None if it is not sampled. Raises
    InvalidRequest.
    """
    if traceparent is None:
        return None
    context = parse_traceparent(traceparent) if isinstance(traceparent, str) else None
    if context is None:
        raise InvalidRequest("traceparent must be one of W3C's trace context", param="traceparent")
    return TraceStamps(context) if context[24] & SAMPLED else None
