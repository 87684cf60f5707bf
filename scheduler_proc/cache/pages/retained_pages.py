"""RetainedPages: the retention that a request asks for, in pages of its sequence."""

from __future__ import annotations

from typing import NamedTuple

from runtime.wire.retention import Retention


class RetainedPages(NamedTuple):
    """Wish to keep pages start .. end - 1 of a sequence at `priority`, for duration_s after their last
    use.
    """

    start: int
    end: int
    priority: int
    duration_s: float
    """Seconds after the last use; 0.0: without limit."""


NO_END = 1 << 31


def retained_pages(retention: Retention, num_prompt: int, page_size: int) -> tuple[RetainedPages, ...]:
    """Return a request's retention in pages, in order and without overlap. A page belongs to the range of its
    first token.
    """
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
