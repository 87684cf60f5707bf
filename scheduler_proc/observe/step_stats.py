"""StepStats: ring of counts of the last steps, from which the records of runtime.wire.stats are made.

    note_launch ──► pending (one for each step in flight) ──note_commit──► ring ──after──► IterationStats

A step leaves one tuple of counts, whatever its size. Records are made of these on request. Records of single
requests, which are off by default, are kept by RequestRecords.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from runtime.wire.stats import (
    InflightBatchingStats,
    IterationStats,
    IterationStatsPage,
    KvCacheStats,
    RequestStatsPage,
    SpecDecodingStats,
    StaticBatchingStats,
    timestamp,
)
from scheduler_proc.batching.prefill_adder import PrefillTotals, StepLimits
from scheduler_proc.core.batch import ScheduleBatch
from scheduler_proc.core.lifecycle import Lifecycle
from scheduler_proc.core.request import Request
from scheduler_proc.observe.draft_totals import DraftTotals
from scheduler_proc.observe.request_records import RequestRecords, records_after

MEMORY_S = 1.0
"""Seconds between two readings of the process's memory, which take 10 us each."""
LATENCY_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class StatsSettings(NamedTuple):
    limits: StepLimits
    is_static: bool = False
    max_iterations: int = 1000
    """Number of iterations in the ring; 0: statistics are off."""
    max_request_iterations: int = 0
    """Number of iterations for which records of requests are kept; 0: none."""
    hides_memory: bool = False
    """True if the device has memory that only the worker can measure."""
    num_stages: int = 1
    """Number of stages of the pipeline that computes a step."""


class Launched(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Counts of a step in flight."""

    step: int
    launched_s: float
    num_scheduled: int
    num_sampling: int
    totals: PrefillTotals
    num_new_active: int
    queue_s: float


class Finished(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Counts of a finished step, and the state of the scheduler after it."""

    launched: Launched
    at_s: float
    """End of the step, in seconds since 1970."""
    latency_s: float
    num_tokens: int
    num_active: int
    num_queued: int
    num_paused: int
    num_completed: int
    num_free: int
    num_new_pages: int
    num_reused: int
    num_missed: int
    memory_bytes: int
    drafts: tuple[int, int, int]
    """Numbers of verified guesses, of accepted ones, and of requests that made some."""
    static: StaticBatchingStats | None


class StaticBatchCounts:
    """Counts of the running static batch: the output of its requests that have ended."""

    def __init__(self) -> None:
        self._outputs: list[int] = []
        self._num_ctx_tokens = 0

    def note_step(self, num_ctx_tokens: int) -> None:
        self._num_ctx_tokens += num_ctx_tokens

    def note_ended(self, num_output: int) -> None:
        self._outputs.append(num_output)

    def take(self) -> StaticBatchingStats:
        """Return the figures of a batch that has ended, and reset the counts."""
        outputs, num_ctx_tokens = self._outputs, self._num_ctx_tokens
        self._outputs, self._num_ctx_tokens = [], 0
        num_gen_tokens, n = sum(outputs), len(outputs)
        empty = max(outputs, default=0) * n - num_gen_tokens
        return StaticBatchingStats(n, n, num_ctx_tokens, num_gen_tokens, empty)


class StepStats:
    """Ring of the steps' counts. The scheduler reports every step, and the life cycle every end of a
    request.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        settings: StatsSettings,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self.drafts = DraftTotals()
        self.mask_wait_s = 0.0
        """Total seconds that turns of the scheduler have waited for the masks of launched steps."""
        self.num_late_masks = 0
        """Number of masks that had not come in time."""
        self.is_on = settings.max_iterations > 0
        self.num_iterations = 0
        self.num_ctx_tokens = 0
        self.num_recomputed_tokens = 0
        self.latency_counts = [0] * (len(LATENCY_BOUNDS_S) + 1)
        """Number of steps in each bucket of latency: at most LATENCY_BOUNDS_S[i], and more than the bound
        before. The last bucket is for longer steps.
        """
        self.latency_sum_s = 0.0
        self.last_step_s = (0.0, 0.0)
        """Begin and end of the last finished step, as its latency counts them."""
        self._lifecycle = lifecycle
        self._kv = lifecycle.kv
        self._rows = lifecycle.kv.rows
        self._settings = settings
        num_kept = settings.max_request_iterations if self.is_on else 0
        self._requests = RequestRecords(lifecycle, num_kept) if num_kept else None
        self._clock = clock
        self._wall_clock = wall_clock
        self._ring: deque[Finished] = deque(maxlen=settings.max_iterations)
        self._pending: deque[Launched] = deque()
        self._static = StaticBatchCounts() if settings.is_static else None
        self._num_completed = 0
        self._num_admitted = 0
        self._queue_s = 0.0
        self._ended_at = 0.0
        self._memory_bytes = 0
        self._look_at = 0.0
        if self.is_on:
            lifecycle.on_finish = self._note_end

    # -- what happens ---------------------------------------------------------------------------------------

    def note_launch(self, step: int, batch: ScheduleBatch, totals: PrefillTotals) -> None:
        if not self.is_on:
            return
        queue = self._lifecycle.queue_times
        new = queue.num_added - self._num_admitted
        num_sampling = len(batch.decodes) + len(batch.single) + len(batch.guessing)
        if batch.loose:
            num_sampling += sum(scheduled.samples for scheduled in batch.loose)
        self._pending.append(
            Launched(step, self._clock(), len(batch), num_sampling, totals, new, queue.sum_s - self._queue_s)
        )
        if new:
            self._num_admitted = queue.num_added
            self._queue_s = queue.sum_s

    def note_commit(self, batch: ScheduleBatch, num_tokens: int) -> None:
        """Record the end of the oldest step in flight, with num_tokens output tokens."""
        if not self.is_on:
            return
        now = self._clock()
        launched = self._pending.popleft()
        self.last_step_s = begun_s, _ = max(launched.launched_s, self._ended_at), now
        latency_s = now - begun_s
        self._ended_at = now
        totals = launched.totals
        self.num_iterations += 1
        self.num_ctx_tokens += totals.num_new_tokens
        self.num_recomputed_tokens += totals.num_recomputed_tokens
        self.latency_counts[bisect_left(LATENCY_BOUNDS_S, latency_s)] += 1
        self.latency_sum_s += latency_s
        if now >= self._look_at:
            self._look_at = now + MEMORY_S
            self._memory_bytes = resident_bytes()
        lifecycle, counts = self._lifecycle, self._kv.counts
        num_paused = lifecycle.num_paused
        self._ring.append(
            Finished(
                launched,
                self._wall_clock(),
                latency_s,
                num_tokens,
                self._rows.num_running + num_paused,
                len(lifecycle.room) - num_paused,
                num_paused,
                self._num_completed,
                self._kv.num_available,
                counts.num_new,
                counts.num_reused,
                counts.num_missed,
                self._memory_bytes,
                self.drafts.take_step(),
                None if self._static is None else self._static_stats(totals),
            )
        )
        self._num_completed = 0
        if self._requests is not None:
            self._requests.note_commit(launched.step, batch)

    def _static_stats(self, totals: PrefillTotals) -> StaticBatchingStats | None:
        assert self._static is not None
        self._static.note_step(totals.num_new_tokens)
        return None if self._rows.num_running else self._static.take()

    def forget_in_flight(self) -> None:
        """Drop the steps in flight, which will never end."""
        self._pending.clear()

    def _note_end(self, req: Request) -> None:
        """Record that a request ends. Called before it gives back its row and pages."""
        self._num_completed += 1
        if self._static is not None and req.row >= 0:
            self._static.note_ended(req.num_output)
        if self._requests is not None:
            self._requests.note_end(req)

    # -- reports --------------------------------------------------------------------------------------------

    def iterations_after(self, step: int, limit: int) -> IterationStatsPage:
        """Return at most `limit` records of steps after this one, the oldest first."""
        found, num_dropped, newest = records_after(self._ring, step, limit, _step_of)
        return IterationStatsPage(tuple(map(self._iteration_stats, found)), num_dropped, newest)

    def requests_after(self, step: int, limit: int, own: Sequence[int]) -> RequestStatsPage:
        """Return at most `limit` records of requests in steps after this one. own: clients whose requests are
        named.
        """
        if self._requests is None:
            return RequestStatsPage((), 0, 0)
        return self._requests.after(step, limit, own)

    def missing_setting(self, of_requests: bool) -> str:
        """Return the setting that must be changed for records to exist; empty if they do."""
        if not self.is_on:
            return "iter_stats_max_iterations"
        return "request_stats_max_iterations" if of_requests and self._requests is None else ""

    def has_news_for(self, step: int) -> bool:
        """Return True if the last step is not `step`, the last one that a reader has seen."""
        return step != (self._ring[-1].launched.step if self._ring else 0)

    def _iteration_stats(self, done: Finished) -> IterationStats:
        launched, kv, settings = done.launched, self._kv, self._settings
        asked = done.num_reused + done.num_missed
        device_memory = None if settings.hides_memory else 0
        return IterationStats(
            timestamp(done.at_s),
            launched.step,
            done.latency_s * 1e3,
            launched.queue_s * 1e3,
            launched.num_new_active,
            done.num_active,
            done.num_queued,
            done.num_completed,
            self._rows.max_rows,
            self._rows.max_rows,
            0,
            settings.limits.max_requests,
            settings.limits.max_tokens,
            0,
            settings.limits.max_tokens,
            device_memory,
            done.memory_bytes,
            device_memory,
            KvCacheStats(
                kv.pages.num_pages,
                done.num_free,
                kv.pages.num_pages - done.num_free,
                kv.page_size,
                done.num_new_pages + done.num_reused,
                done.num_new_pages,
                done.num_reused,
                done.num_missed,
                done.num_reused / asked if asked else 0.0,
            ),
            static_batching_stats=done.static,
            inflight_batching_stats=None
            if self._static is not None
            else _inflight_stats(done, settings.num_stages),
            spec_dec_stats=_drafts_stats(*done.drafts) if done.drafts[0] else None,
        )

    def totals(self) -> dict[str, int | float | str | list[int] | list[float]]:
        """Return the totals since the start, for server_info."""
        return {
            "num_iterations": self.num_iterations,
            "num_ctx_tokens": self.num_ctx_tokens,
            "num_recomputed_ctx_tokens": self.num_recomputed_tokens,
            "iter_latency_bounds_s": list(LATENCY_BOUNDS_S),
            "iter_latency_counts": self.latency_counts,
            "iter_latency_sum_s": self.latency_sum_s,
            "mask_wait_s": self.mask_wait_s,
            "num_late_masks": self.num_late_masks,
            **self.drafts.totals(),
        }


def _step_of(done: Finished) -> int:
    return done.launched.step


def _inflight_stats(done: Finished, num_stages: int) -> InflightBatchingStats:
    launched, totals = done.launched, done.launched.totals
    return InflightBatchingStats(
        launched.num_scheduled,
        totals.num_prefills,
        launched.num_scheduled - totals.num_prefills,
        done.num_paused,
        totals.num_new_tokens,
        totals.num_recomputed_tokens,
        (launched.step - 1) % num_stages,
        done.num_tokens / launched.num_sampling if launched.num_sampling else 0.0,
    )


def _drafts_stats(num_drafted: int, num_accepted: int, num_requests: int) -> SpecDecodingStats:
    acceptance_length = (num_accepted + num_requests) / num_requests
    return SpecDecodingStats(num_drafted, num_accepted, num_requests, acceptance_length)


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
