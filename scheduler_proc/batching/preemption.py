"""Preemption: a waiting request of a higher priority takes rows and pages from running ones of a lower.

Comes before anything is planned: what is in the step already can no longer give way.
"""

from __future__ import annotations

import logging

import numpy as np

from runtime.base.errors import RequestError
from scheduler_proc.batching.admission import MAX_PASSED_OVER, Admission
from scheduler_proc.cache.kv_cache_manager import Prefix
from scheduler_proc.capacity.max_utilization import MaxUtilization
from scheduler_proc.core.lifecycle import Lifecycle
from scheduler_proc.core.request import Request
from scheduler_proc.features.base import combined_cost

logger = logging.getLogger(__name__)


class Preemption:
    """Only beside a capacity policy that takes rows back anyway."""

    def __init__(self, lifecycle: Lifecycle, admission: Admission, capacity: MaxUtilization) -> None:
        self._lifecycle = lifecycle
        self._kv = lifecycle.kv
        self._rows = lifecycle.kv.rows
        self._admission = admission
        self._capacity = capacity

    def make_way(self) -> None:
        """Retract as many running requests as those that wait with a higher priority need: the lowest
        priority and the latest started first. Who waits is admitted where all are.
        """
        waiting, rows = self._lifecycle.waiting, self._rows
        if not len(waiting) or not rows.num_running or self._lifecycle.solitary:
            return
        lowest = rows.priority[rows.running].min()
        locked: list[Prefix] = []
        num_rows = num_pages = 0
        for position in range(min(len(waiting), MAX_PASSED_OVER)):
            req = waiting[position]
            if req.priority <= lowest:
                break
            prefix = self._prefix_of(req)
            if prefix is None:
                continue
            self._kv.cache.lock(prefix.node)
            locked.append(prefix)
            cost = combined_cost(req.features)
            num_rows += cost.rows
            num_pages += self._capacity.pages_for(req) - prefix.num_pages + cost.pages
            if not self._try_free(num_rows, num_pages, req.priority):
                break
        for prefix in locked:
            self._kv.cache.unlock(prefix.node)

    def _prefix_of(self, req: Request) -> Prefix | None:
        try:
            return self._admission.prefix_if_it_may_start(req)
        except RequestError:
            return None  # it fails where it would be admitted

    def _try_free(self, num_rows: int, num_pages: int, priority: int) -> bool:
        """So many rows and pages, from requests below this priority; nothing when they cannot give enough."""
        victims = [req for req in self._rows.running_requests() if req.priority < priority]
        held = int(self._kv.num_held(np.array([req.row for req in victims], np.intp)).sum())
        if num_rows > self._rows.num_free + len(victims) or num_pages > self._kv.num_available + held:
            return False
        while self._rows.num_free < num_rows or not self._capacity.has_room_for(num_pages):
            if not victims:
                return False
            victim = self._capacity.victim(victims)
            assert victim is not None
            victims.remove(victim)
            self._lifecycle.retract(victim)
            logger.info(
                "a higher priority waits: retracted a request, %d in all", self._lifecycle.num_retracted
            )
        return True
