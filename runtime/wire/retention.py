"""Retention: how long, and how firmly, a request's KV is to be kept. TensorRT-LLM's KvCacheRetentionConfig as
the wire carries it.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta

from runtime.base.errors import InvalidRequest
from runtime.wire.format import Count, Record

DEFAULT_PRIORITY = 35
"""Priority of KV that no request said anything about."""
MAX_PRIORITY = 100
MAX_RANGES = 64

RetentionPriority: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_PRIORITY)]
"""Priority from 0 to 100: pages of a lower one are evicted first."""


class RetainedRange(Record, frozen=True):
    """Range of a sequence's tokens, start .. end - 1, with a retention priority. A page belongs to the range
    of its first token.
    """

    start: Count
    end: Count | None
    """Token behind the range's last. None: the range goes to the end of the prompt."""
    priority: RetentionPriority
    duration_ms: Count = 0
    """Milliseconds that the priority holds after the last use of the page, before it is the default; 0: for
    ever.
    """


class Retention(Record, frozen=True):
    """Retention of a prompt's KV, and of that of what is generated behind it."""

    ranges: Annotated[tuple[RetainedRange, ...], Meta(max_length=MAX_RANGES)] = ()
    """Ranges of the prompt, in order and without overlap. What is in none of them is left as it is."""
    decode_priority: RetentionPriority = DEFAULT_PRIORITY
    decode_duration_ms: Count = 0

    def validate(self) -> None:
        """Check the ranges. Raises InvalidRequest that names the field."""
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
