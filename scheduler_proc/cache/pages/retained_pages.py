"""RetainedPages: a request's retention, in pages of its sequence."""

from __future__ import annotations

from typing import NamedTuple

from runtime.wire.retention import Retention


class RetainedPages(NamedTuple):
    """Pages start .. end - 1 are to be kept at `priority`, for duration_s after their last use."""

    start: int
    end: int
    priority: int
    duration_s: float
    """0.0: for ever."""


NO_END = 1 << 31


def retained_pages(retention: Retention, num_prompt: int, page_size: int) -> tuple[RetainedPages, ...]:
    """In order, without overlap. A page belongs to the range of its first token."""
    spans = []
    for each in retention.ranges:
        end = num_prompt if each.end is None else min(each.end, num_prompt)
        spans.append((each.start, end, each.priority, each.duration_ms))
    spans.append((num_prompt, NO_END, retention.decode_priority, retention.decode_duration_ms))
    return tuple(
        RetainedPages(first, last, priority, duration_ms / 1000)
        for start, end, priority, duration_ms in spans
        if (first := -(-start // page_size)) < (last := -(-end // page_size))
    )
