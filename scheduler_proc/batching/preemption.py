"""Preemption: retracts running requests for waiting ones of a higher priority. It runs before a step is
planned, because a row in the step can no longer give way.
"""

from __future__ import annotations

import logging
from itertools import islice

import numpy as np

from runtime.base.errors import RequestError
from scheduler_proc.batching.admission import MAX_PASSED_OVER, Admission
from scheduler_proc.cache.kv_cache_manager import Prefix
from scheduler_proc.cache.tenants import tenant_of
from scheduler_proc.capacity.max_utilization import MaxUtilization
from scheduler_proc.core.lifecycle import Lifecycle
from scheduler_proc.core.request import Request
from scheduler_proc.features.base import combined_cost

logger = logging.getLogger(__name__)


class Preemption:
    """Frees rows and pages for waiting requests of a higher priority. Used only with a capacity policy that
    retracts anyway.
    """

    def __init__(self, lifecycle: Lifecycle, admission: Admission, capacity: MaxUtilization) -> None:
        self._lifecycle = lifecycle
        self._kv = lifecycle.kv
        self._rows = lifecycle.kv.rows
        self._admission = admission
        self._capacity = capacity

    def preempt(self) -> None:
        """Retract as many running requests as the waiting ones with a higher priority need. Victims are those
        of the lowest urgency, and among them the latest started.

        The rows and pages of starving requests count too, because they are admitted first, although a
        starving request causes no retraction within its own priority. A request that takes its tenant beyond
        its cache share only retracts requests of its own tenant: pages that others gave up would be withheld
        from it.
        """
        waiting, rows = self._lifecycle.waiting, self._rows
        if not len(waiting) or not rows.num_running or self._lifecycle.only_suspects_may_start:
            return
        lowest = rows.urgency[rows.running].min()
        if not self._wants_any(lowest):
            return
        locked: list[Prefix] = []
        num_rows = num_pages = 0
        for req in list(islice(waiting, MAX_PASSED_OVER)):
            if req.priority <= lowest and not req.is_starved:
                break
            prefix = self._prefix_of(req)
            if prefix is None:
                continue
            self._kv.cache.lock(prefix.node)
            locked.append(prefix)
            cost = combined_cost(req.features, req.contents)
            num_missing = self._capacity.pages_for(req) - prefix.num_pages + cost.pages
            if req.priority <= lowest:
                num_rows += cost.rows
                num_pages += num_missing
                continue
            num_withheld = self._kv.guard.num_withheld(prefix.node, num_missing)
            only_own = self._kv.guard.is_beyond_share(prefix.node, num_missing)
            victims = self._victims_of(req, only_own=only_own)
            if self._try_free(num_rows + cost.rows, num_pages + num_missing + num_withheld, victims):
                num_rows += cost.rows
                num_pages += num_missing
            elif not only_own:
                break
        for prefix in locked:
            self._kv.cache.unlock(prefix.node)

    def _wants_any(self, lowest: int) -> bool:
        """Return True if a waiting request has a priority above `lowest`. The queue is sorted, so the first
        request that does not starve has the highest priority of those.
        """
        waiting = self._lifecycle.waiting
        if not waiting[0].is_starved:
            return waiting[0].priority > lowest
        num_looked_at = min(waiting.num_starved + 1, len(waiting), MAX_PASSED_OVER)
        return any(waiting[position].priority > lowest for position in range(num_looked_at))

    def _prefix_of(self, req: Request) -> Prefix | None:
        try:
            is_prepared = self._admission.is_prepared(req)
            return self._admission.prefix_if_it_may_start(req) if is_prepared else None
        except RequestError:
            return None  # the error is raised again when it is admitted

    def _victims_of(self, req: Request, *, only_own: bool) -> list[Request]:
        """Return the running requests that may be retracted for req, only those of its own tenant if only_own
        is true.
        """
        victims = [each for each in self._rows.running_requests() if each.urgency < req.priority]
        if only_own:
            tenant = tenant_of(req.namespace)
            victims = [each for each in victims if tenant_of(each.namespace) == tenant]
        return victims

    def _try_free(self, num_rows: int, num_pages: int, victims: list[Request]) -> bool:
        """Retract victims until num_rows rows and num_pages pages are free. Returns False, and changes
        nothing, if they cannot give that much.
        """
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
