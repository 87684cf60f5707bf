"""Expected statistics of each iteration, counted from the plans and the requests themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isclose

import msgspec

from runtime.wire.format import unpack_ids
from runtime.wire.plan import BatchPlan
from runtime.wire.stats import IterationStats
from scheduler_proc.core.lifecycle import Lifecycle
from scheduler_proc.core.request import Request, Status
from scheduler_proc.observe.step_stats import StepStats


@dataclass(slots=True, frozen=True)
class Expected:
    """Statistics of one step, when it is launched."""

    launched_s: float
    num_scheduled: int
    num_context: int
    num_ctx_tokens: int
    num_recomputed: int
    num_new: int
    waited_s: float


class StatsWatch:
    """Told of every launch and every turn; raises AssertionError when a record says something else."""

    def __init__(self, stats: StepStats, lifecycle: Lifecycle, clock: Callable[[], float]) -> None:
        self._stats = stats
        self._lifecycle = lifecycle
        self._clock = clock
        self._launched: dict[int, Expected] = {}
        self._reach: dict[int, int] = {}
        """By request: up to where it has been computed at any time."""
        self._admitted: set[int] = set()
        self._num_new = 0
        """Number of `_admitted` that are in no record yet."""
        self._waited_s = 0.0
        """Seconds that they had waited in all."""
        self._num_added = 0
        self._num_completed = 0
        self._last = 0
        self._ended_s = 0.0
        self._batch_ctx_tokens = 0
        self._planned_last = False
        """A step was planned in this turn after one had ended, so the newest record is not of now."""
        self._add = lifecycle.add
        lifecycle.add = self._count_added  # type: ignore[method-assign]

    def _count_added(self, req: Request, stream_open: msgspec.Raw, more: Sequence[msgspec.Raw] = ()) -> None:
        self._num_added += 1
        self._add(req, stream_open, more)

    def note_fork(self, child: Request) -> None:
        """It has got a row without having waited, and what its parent had computed."""
        self._num_added += 1
        self._admitted.add(child.seq)
        self._reach[child.seq] = child.kv_len

    def _look_at_rows(self) -> None:
        for req in self._lifecycle.kv.rows.running_requests():
            if req.seq not in self._admitted:
                self._admitted.add(req.seq)
                self._num_new += 1
                self._waited_s += self._clock() - req.arrived_s

    def note_build(self) -> None:
        """A batch is about to be put together, which may give and take pages."""
        self._planned_last = self._stats.has_news_for(self._last)

    def note_launch(self, plan: BatchPlan) -> None:
        self._look_at_rows()
        rows = self._lifecycle.kv.rows
        num_context = num_ctx_tokens = num_first_time = 0
        lens = [1] * plan.num_decodes + (unpack_ids(plan.lens) - unpack_ids(plan.drafts)).tolist()
        starts = unpack_ids(plan.starts).tolist()
        for row, start, num_new in zip(unpack_ids(plan.rows).tolist(), starts, lens, strict=True):
            req = rows.holder[row]
            assert req is not None
            reach = self._reach.get(req.seq, 0)
            self._reach[req.seq] = max(reach, start + num_new)
            if start < req.num_given:
                num_context += 1
                num_ctx_tokens += num_new
                num_first_time += max(0, min(start + num_new, req.num_prompt) - max(start, reach))
        self._launched[plan.step] = Expected(
            self._clock(),
            len(starts),
            num_context,
            num_ctx_tokens,
            num_ctx_tokens - num_first_time,
            self._num_new,
            self._waited_s,
        )
        self._num_new = 0
        self._waited_s = 0.0

    def check(self) -> None:
        """After a turn of the loop."""
        self._look_at_rows()
        page = self._stats.iterations_after(self._last, 100)
        for record in page.records:
            self._check_step(record)
        if page.records and not self._planned_last:
            self._check_state(page.records[-1])
        self._planned_last = False

    def _check_step(self, record: IterationStats) -> None:
        assert record.iter == self._last + 1, "a step without a record"
        self._last = record.iter
        expected = self._launched.pop(record.iter)
        assert record.num_new_active_requests == expected.num_new, "who was admitted"
        waited_ms = record.new_active_requests_queue_latency_ms
        assert isclose(waited_ms, expected.waited_s * 1e3, abs_tol=1e-6), "how long they had waited"
        took_s = self._clock() - max(expected.launched_s, self._ended_s)
        assert isclose(record.iter_latency_ms, took_s * 1e3, abs_tol=1e-6), "the latency of another step"
        self._ended_s = self._clock()
        self._num_completed += record.num_completed_requests
        self._batch_ctx_tokens += expected.num_ctx_tokens
        inflight, static = record.inflight_batching_stats, record.static_batching_stats
        if inflight is not None:
            assert inflight.num_scheduled_requests == expected.num_scheduled, "who was in the step"
            assert inflight.num_context_requests == expected.num_context, "whose prompts were in the step"
            assert inflight.num_ctx_tokens == expected.num_ctx_tokens, "context tokens"
            assert inflight.num_recomputed_ctx_tokens == expected.num_recomputed, "recomputed tokens"
        elif static is not None:
            assert static.num_ctx_tokens == self._batch_ctx_tokens, "context tokens of a static batch"
            self._batch_ctx_tokens = 0

    def _check_state(self, record: IterationStats) -> None:
        """The last record of a turn: nothing has changed since."""
        lifecycle, live = self._lifecycle, self._lifecycle.requests.values()
        num_queued = sum(req.seq not in self._admitted for req in live)
        num_waiting = sum(req.status is Status.WAITING for req in live)
        assert record.num_queued_requests == num_queued, "the queue"
        assert record.num_active_requests == len(live) - num_queued, "who has been admitted and lives"
        num_ended = self._num_added - lifecycle.num_replaced - len(live)
        assert self._num_completed == num_ended, "who has ended"
        kv = record.kv_cache_stats
        assert kv.free_num_blocks + kv.used_num_blocks == kv.max_num_blocks, "free + used = max"
        assert kv.free_num_blocks == lifecycle.kv.num_available, "free pages"
        rows = lifecycle.kv.rows
        assert kv.used_num_blocks or not rows.kv_len[rows.running].any(), "rows without pages"
        if record.inflight_batching_stats is not None:
            num_paused = record.inflight_batching_stats.num_paused_requests
            assert num_paused == num_waiting - num_queued, "who is paused"
