"""RequestPerfMetrics: times and pages of one sequence, which come with its end when it asked for them
(`return_perf_metrics`). Stamp: a moment on its way through the ring, noted of sampled requests alone.

The names are those of TensorRT-LLM. Times are seconds of CLOCK_MONOTONIC of the machine that serves, as
`time.monotonic()` gives them there; elsewhere only their differences mean something.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from runtime.wire.format import Count, Record

TRACE_CONTEXT_BYTES = 25
"""Trace id (16), span id of the parent (8), flags (1), as in W3C's traceparent."""
MAX_STAMPS = 64
"""Most stamps of one sequence, of all its attempts together."""
StampName: TypeAlias = Literal[
    "tokenizer_in",
    "tokenizer_out",
    "scheduler",
    "row",
    "chunk",
    "first_token",
    "retraction",
    "attempt",
    "last_token",
    "closed",
    "detokenizer",
]


class TimingMetrics(Record, frozen=True):
    """Moments of one sequence, in seconds of CLOCK_MONOTONIC; None has not happened. A sequence that goes on
    after a restart has the times of its last attempt, but for its arrival.
    """

    arrival_time: float
    """Moment at which the caller asked (`arrival_time` of the request), else at which it was received."""
    first_scheduled_time: float | None = None
    """Moment at which the sequence first got a row."""
    first_token_time: float | None = None
    """Moment at which the scheduler had the result of the step that computed its first token."""
    last_token_time: float | None = None


class KvCacheMetrics(Record, frozen=True):
    """Pages of KV of one sequence. TensorRT-LLM's names say block for page."""

    num_total_allocated_blocks: Count
    """Pages of its row when it ended; 0 when it had none then."""
    num_new_allocated_blocks: Count
    """Pages of the sequence's row that were not found in the cache."""
    num_reused_blocks: Count
    """Pages of its prompt that were in the cache when it first got a row."""
    num_missed_blocks: Count
    """Pages of the sequence's prompt that were not in the cache when it first got a row."""

    @staticmethod
    def of(page_size: int, num_pages: int, num_prompt: int, num_cached: int) -> KvCacheMetrics:
        """Make the metrics of a row of num_pages pages. num_cached: tokens of its prompt that were in the
        cache; -1 before its first row.
        """
        reused = max(0, num_cached) // page_size
        asked = -(-num_prompt // page_size) if num_cached >= 0 else 0
        return KvCacheMetrics(num_pages, max(0, num_pages - reused), reused, asked - reused)

    @property
    def kv_cache_hit_rate(self) -> float:
        """Return the share of reused pages, reused / (reused + missed), 0.0 to 1.0."""
        asked = self.num_reused_blocks + self.num_missed_blocks
        return self.num_reused_blocks / asked if asked else 0.0


class RequestPerfMetrics(Record, frozen=True):
    timing_metrics: TimingMetrics
    kv_cache_metrics: KvCacheMetrics
    first_iter: Count | None = None
    """IterationStats.iter of the step that computed its first token."""
    last_iter: Count | None = None
    """IterationStats.iter of the step that computed its last token."""


class Stamp(Record, frozen=True):
    """One moment of one sequence on its way through the ring."""

    name: StampName
    at_s: float
    """Time of the stamp, in seconds of CLOCK_MONOTONIC."""
    value: Count = 0
    """Number that belongs to the stamp. scheduler: the sequence's number there; row: prompt tokens that were
    cached; chunk: tokens computed with it; first_token, last_token, closed: output tokens by then; attempt:
    the number of the one that begins.
    """


class TraceStamps(Record, frozen=True):
    """The trace of a sampled request: what its caller calls it, and what was noted of it so far."""

    context: Annotated[bytes, Meta(min_length=TRACE_CONTEXT_BYTES, max_length=TRACE_CONTEXT_BYTES)]
    stamps: Annotated[tuple[Stamp, ...], Meta(max_length=MAX_STAMPS)] = ()

    def add(self, *stamps: Stamp) -> TraceStamps:
        """Return the trace with more stamps; those beyond MAX_STAMPS are dropped."""
        return TraceStamps(self.context, (*self.stamps, *stamps)[:MAX_STAMPS])
