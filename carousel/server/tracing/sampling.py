"""Sampling of requests on a server that sends no traces: those that their callers sample, and a share of the
others. The ring keeps a timeline of each sampled request.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterable

from carousel.client.tracing.trace_context import SAMPLED, format_traceparent, parse_traceparent

TRACEPARENT = b"traceparent"


def traceparent_of(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return the request's traceparent; None if there is not exactly one or it is invalid (W3C's rules)."""
    given = [value for name, value in headers if name == TRACEPARENT]
    if len(given) != 1 or not given[0].isascii():
        return None
    text = given[0].decode()
    return None if parse_traceparent(text) is None else text


def new_traceparent() -> str:
    return format_traceparent(secrets.token_bytes(24) + bytes((SAMPLED,)))


def sampled_traceparent(headers: Iterable[tuple[bytes, bytes]], share: float) -> str | None:
    """Return the traceparent of a sampled request: its caller's, or a new one for a `share` of the requests
    without one. None if it is not sampled.
    """
    given = traceparent_of(headers)
    if given is not None:
        context = parse_traceparent(given)
        return given if context is not None and context[24] & SAMPLED else None
    return new_traceparent() if share and random.random() < share else None
