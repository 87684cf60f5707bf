"""Which requests are sampled, where no traces are sent: those that their callers sample, and a share of the
others. Of a sampled request the ring keeps a timeline.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterable

from carousel.client.tracing.trace_context import SAMPLED, format_traceparent, parse_traceparent

TRACEPARENT = b"traceparent"


def traceparent_of(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The one valid traceparent among a request's headers. By W3C's rules any other counts as none."""
    given = [value for name, value in headers if name == TRACEPARENT]
    if len(given) != 1 or not given[0].isascii():
        return None
    text = given[0].decode()
    return None if parse_traceparent(text) is None else text


def new_traceparent() -> str:
    return format_traceparent(secrets.token_bytes(24) + bytes((SAMPLED,)))


def sampled_traceparent(headers: Iterable[tuple[bytes, bytes]], share: float) -> str | None:
    """The context of a request: its caller's, or a new one for a `share` of those without; None: it is not
    sampled.
    """
    given = traceparent_of(headers)
    if given is not None:
        context = parse_traceparent(given)
        return given if context is not None and context[24] & SAMPLED else None
    return new_traceparent() if share and random.random() < share else None
