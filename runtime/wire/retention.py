"""Retention: how long and with which priority a request's KV cache is kept; TensorRT-LLM's
KvCacheRetentionConfig on the wire.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta

from runtime.base.errors import InvalidRequest
from runtime.wire.format import Count, Record

DEFAULT_PRIORITY = 35
"""Priority of KV cache pages for which no request has asked."""
MAX_RETENTION_PRIORITY = 100
MAX_RANGES = 64

RetentionPriority: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_RETENTION_PRIORITY)]
"""Priority from 0 to 100. Pages of a lower one are evicted first."""


class RetainedRange(Record, frozen=True):
    """Range of a sequence's tokens, start .. end - 1, with a retention priority. A page belongs to the range
    of its first token.
    """

    start: Count
    end: Count | None
    """Position after the range's last token. None: the range extends to the end of the prompt."""
    priority: RetentionPriority
    duration_ms: Count = 0
    """Milliseconds after the last use of a page for which the priority holds, before it returns to the
    default; 0: without limit.
    """


class Retention(Record, frozen=True):
    """Retention of the KV cache of a prompt and of its output."""

    ranges: Annotated[tuple[RetainedRange, ...], Meta(max_length=MAX_RANGES)] = ()
    """Ranges of the prompt, in order and without overlap. Pages in no range stay as they are."""
    decode_priority: RetentionPriority = DEFAULT_PRIORITY
    decode_duration_ms: Count = 0

    def validate(self) -> None:
        """Check the ranges. Raises InvalidRequest, which names the field."""
        position = 0
        for number, each in enumerate(self.ranges):
            name = f"kv_cache_retention_config.token_range_retention_configs[{number}]"
            if each.start < position:
                raise _invalid(f"{name} begins at {each.start}, within the range before it")
            if each.end is not None and each.end <= each.start:
                raise _invalid(f"{name} ends at {each.end}, it begins at {each.start}")
            if each.end is None and number < len(self.ranges) - 1:
                raise _invalid(f"{name}: only the last range may have no end")
            position = each.end or 0


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="kv_cache_retention_config")
