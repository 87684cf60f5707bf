"""RequestPerfMetrics: times and pages of one sequence, which come with its end if it asked for them
(`return_perf_metrics`). Stamp: the time of an event of a traced sequence.

Names are those of TensorRT-LLM. Times are seconds of CLOCK_MONOTONIC of the serving machine, as
`time.monotonic()` returns there; elsewhere only differences are meaningful.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from runtime.wire.format import Count, Record

TRACE_CONTEXT_BYTES = 25
"""Size of a trace context: trace id (16), span id of the parent (8), flags (1), as in W3C's traceparent."""
MAX_STAMPS = 64
"""Maximum number of stamps of one sequence, over all of its attempts."""
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
    """Times of one sequence's events, in seconds of CLOCK_MONOTONIC; None: has not happened. After a restart
    they are those of the last attempt, except for the arrival.
    """

    arrival_time: float
    """Time at which the caller asked (`arrival_time` of the request), or else at which it was received."""
    first_scheduled_time: float | None = None
    """Time at which the sequence first got a row."""
    first_token_time: float | None = None
    """Time at which the scheduler had the result of the step with its first token."""
    last_token_time: float | None = None


class KvCacheMetrics(Record, frozen=True):
    """KV cache pages of one sequence. TensorRT-LLM calls pages blocks."""

    num_total_allocated_blocks: Count
    """Number of pages of its row when it ended; 0 if it had no row then."""
    num_new_allocated_blocks: Count
    """Number of pages of its row that were not found in the cache."""
    num_reused_blocks: Count
    """Number of its prompt's pages that were cached when it first got a row."""
    num_missed_blocks: Count
    """Number of its prompt's pages that were not cached when it first got a row."""

    @staticmethod
    def of(page_size: int, num_pages: int, num_prompt: int, num_cached: int) -> KvCacheMetrics:
        """Return the metrics of a row with num_pages pages. num_cached: cached tokens of its prompt; -1
        before its first row.
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
    """Time of one event of one sequence."""

    name: StampName
    at_s: float
    """Time of the event, in seconds of CLOCK_MONOTONIC."""
    value: Count = 0
    """Number that belongs to the event. scheduler: number of the sequence; row: cached prompt tokens; chunk:
    tokens computed up to and with it; first_token, last_token, closed: output tokens so far; attempt: number
    of the new attempt.
    """


class TraceStamps(Record, frozen=True):
    """Trace of a sampled request: its trace context, and the events recorded so far."""

    context: Annotated[bytes, Meta(min_length=TRACE_CONTEXT_BYTES, max_length=TRACE_CONTEXT_BYTES)]
    stamps: Annotated[tuple[Stamp, ...], Meta(max_length=MAX_STAMPS)] = ()

    def add(self, *stamps: Stamp) -> TraceStamps:
        """Return the trace with more stamps. Stamps beyond MAX_STAMPS are dropped."""
        return TraceStamps(self.context, (*self.stamps, *stamps)[:MAX_STAMPS])
