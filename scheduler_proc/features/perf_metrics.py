"""PerfMetrics: records the times of a sequence's events, and adds them to its terminal message. For requests
that ask for it.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from runtime.wire.messages import Closed
from runtime.wire.perf_metrics import KvCacheMetrics, RequestPerfMetrics, TimingMetrics
from scheduler_proc.cache.kv_cache_manager import KVCacheManager
from scheduler_proc.core.request import Request
from scheduler_proc.core.samples import Sampled
from scheduler_proc.features.base import RequestFeature


class PerfMetrics(RequestFeature):
    def __init__(self, req: Request, kv: KVCacheManager, clock: Callable[[], float]) -> None:
        self._req = req
        self._kv = kv
        self._clock = clock
        self._scheduled_s: float | None = None
        self._first: tuple[float, int] | None = None
        """Time and step of its first token."""
        self._last: tuple[float, int] | None = None
        """Time and step of the last token that this feature has seen."""
        self._row = -1

    def row_opened(self, row: int) -> None:
        self._row = row
        if self._scheduled_s is None:
            self._scheduled_s = self._clock()

    def accept(self, sampled: Sampled) -> list[int]:
        if sampled.ids:
            self._last = (self._clock(), sampled.step)
            self._first = self._first or self._last
        return sampled.ids

    @property
    def is_settled(self) -> bool:
        return True

    def row_lost(self) -> None:
        self._note_last()
        self._row = -1

    def _note_last(self) -> None:
        if self._row >= 0:
            self._last = self._req.rows.last_time(self._row) or self._last

    def closing(self, closed: Closed) -> Closed:
        req, kv = self._req, self._kv
        self._note_last()
        first_s, first_step = self._first or (None, None)
        last_s, last_step = self._last or (None, None)
        num_pages = kv.num_pages_of[req.row] if req.row >= 0 else 0
        metrics = RequestPerfMetrics(
            TimingMetrics(req.arrived_s, self._scheduled_s, first_s, last_s),
            KvCacheMetrics.of(kv.page_size, num_pages, req.num_prompt, req.cached_tokens),
            first_step,
            last_step,
        )
        return msgspec.structs.replace(closed, perf_metrics=metrics)


def attach_perf_metrics(
    kv: KVCacheManager, clock: Callable[[], float]
) -> Callable[[Request], RequestFeature | None]:
    """Return a feature factory that gives PerfMetrics to each request that asked."""

    def attach(req: Request) -> RequestFeature | None:
        return PerfMetrics(req, kv, clock) if req.sampling.return_perf_metrics else None

    return attach
