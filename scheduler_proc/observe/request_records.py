"""RequestRecords: state of every live request after each of the last steps.

Recording costs 2 us a step for each request, and nothing when it is off. As in StepStats, the records for
clients are made of the figures on request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple, TypeVar

from runtime.wire.handle import split_handle
from runtime.wire.perf_metrics import KvCacheMetrics
from runtime.wire.stats import RequestStats, RequestStatsPage, RequestStatsPerIteration, Stage
from scheduler_proc.core.batch import ScheduleBatch
from scheduler_proc.core.lifecycle import Lifecycle
from scheduler_proc.core.request import Request, Status

MAX_ENDED = 1 << 14
"""Largest number of ended requests in the record of a step. They are kept until the next step, and while
generation is paused there is none; the first ones are dropped.
"""


class RequestFigures(NamedTuple):
    """Figures of one request after one step, from which RequestStats are made on demand."""

    handle: bytes
    id: int
    stage: Stage
    kv_len: int
    num_prompt: int
    num_output: int
    is_scheduled: bool
    is_paused: bool
    num_pages: int
    num_cached: int
    num_accepted: int


class RequestRecords:
    def __init__(self, lifecycle: Lifecycle, max_iterations: int) -> None:
        self._lifecycle = lifecycle
        self._kv = lifecycle.kv
        self._ring: deque[tuple[int, list[RequestFigures]]] = deque(maxlen=max_iterations)
        self._ended: deque[RequestFigures] = deque(maxlen=MAX_ENDED)

    def note_end(self, req: Request) -> None:
        """Record that a request ends, before it gives back its row and pages."""
        self._ended.append(self._figures(req, frozenset(), "GENERATION_COMPLETE"))

    def note_commit(self, step: int, batch: ScheduleBatch) -> None:
        """Record the requests that ended since the last step, at most MAX_ENDED, and the live ones, in order
        of arrival.
        """
        scheduled = frozenset(batch.order[batch.still_held()].tolist())
        figures = list(self._ended)
        self._ended.clear()
        live = self._lifecycle.requests.values()
        figures += [self._figures(req, scheduled, self._stage(req)) for req in live]
        self._ring.append((step, sorted(figures, key=lambda each: each.id)))

    def _stage(self, req: Request) -> Stage:
        if req.status is Status.WAITING:
            return "QUEUED"
        return "GENERATION_IN_PROGRESS" if req.num_output or req.num_in_flight else "CONTEXT_IN_PROGRESS"

    def _figures(self, req: Request, scheduled: frozenset[int], stage: Stage) -> RequestFigures:
        has_row = req.row >= 0
        return RequestFigures(
            req.handle,
            req.seq,
            stage,
            req.kv_len,
            req.num_prompt,
            req.num_output,
            has_row and (stage == "GENERATION_COMPLETE" or req.row in scheduled),
            req.status is Status.WAITING and req.num_retractions > 0,
            self._kv.num_pages_of[req.row] if has_row else 0,
            req.cached_tokens,
            req.num_accepted_drafts,
        )

    def _request_stats(self, figures: RequestFigures, own: Sequence[int]) -> RequestStats:
        client, number, index, _ = split_handle(figures.handle)
        pages = KvCacheMetrics.of(
            self._kv.page_size, figures.num_pages, figures.num_prompt, figures.num_cached
        )
        return RequestStats(
            figures.id,
            number + 1 if client in own else None,
            index,
            figures.stage,
            min(figures.kv_len, figures.num_prompt),
            figures.num_output,
            figures.num_output / max(1, figures.num_output - figures.num_accepted),
            figures.is_scheduled,
            figures.is_paused,
            pages.num_total_allocated_blocks,
            pages.num_new_allocated_blocks,
            pages.num_reused_blocks,
            pages.num_missed_blocks,
            pages.kv_cache_hit_rate,
        )

    def after(self, step: int, limit: int, own: Sequence[int]) -> RequestStatsPage:
        """Return at most `limit` records of steps after this one, the oldest first. own: clients whose
        requests are named in them.
        """
        found, num_dropped, newest = records_after(self._ring, step, limit, _first)
        records = [
            RequestStatsPerIteration(number, tuple([self._request_stats(each, own) for each in figures]))
            for number, figures in found
        ]
        return RequestStatsPage(tuple(records), num_dropped, newest)


T = TypeVar("T")


def records_after(
    ring: deque[T], step: int, limit: int, number: Callable[[T], int]
) -> tuple[list[T], int, int]:
    """Return (the oldest records after `step`, how many after it were dropped, number of the last one). The
    steps in the ring are consecutive.
    """
    newest = number(ring[-1]) if ring else 0
    if newest <= step:
        return [], 0, newest
    oldest = number(ring[0])
    skip = max(0, step + 1 - oldest)
    return list(islice(ring, skip, skip + limit)), max(0, oldest - step - 1), newest


def _first(entry: tuple[int, list[RequestFigures]]) -> int:
    return entry[0]
