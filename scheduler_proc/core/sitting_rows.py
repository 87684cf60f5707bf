"""SittingRows: rows that keep their place and their pages, but take part in no step until their masks are
there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from runtime.base.errors import RequestError
from runtime.wire.error_info import error_info
from scheduler_proc.core.batch import ScheduleBatch
from scheduler_proc.core.lifecycle import Lifecycle
from scheduler_proc.core.request import Request
from scheduler_proc.core.scheduled_row import ScheduledRow
from scheduler_proc.port import Readiness

MAX_SIT_S = 1.0
"""Seconds for which a row that could go on but for its masks keeps its place. Then it is retracted, so that
others do not wait for its pages while the grammar process is dead.
"""


class Sitting(NamedTuple):
    """A row that sits out in a stay, and what it waits for."""

    req: Request
    stay: int
    masked_by: Readiness
    until_s: float
    """Time up to which it keeps its place; by then its tokens are committed."""


class SittingRows:
    def __init__(
        self, lifecycle: Lifecycle, is_ready: Callable[[Readiness], bool], now_s: Callable[[], float]
    ) -> None:
        """is_ready, now_s: as in Port."""
        self._lifecycle = lifecycle
        self._rows = lifecycle.kv.rows
        self._is_ready = is_ready
        self._now_s = now_s
        self._sitting: list[Sitting] = []

    def add(self, scheduled: ScheduledRow[Request]) -> None:
        """Plan no step with a row until its tokens are committed and its next masks are there."""
        row = scheduled.row
        assert scheduled.masked_by is not None
        self._rows.sit_out(row)
        until_s = self._now_s() + MAX_SIT_S
        self._sitting.append(Sitting(scheduled.req, self._rows.stay_of[row], scheduled.masked_by, until_s))

    def take_back(self, scheduled: ScheduledRow[Request], batch: ScheduleBatch) -> None:
        """Take a row out of the step that was launched last, the only one that it is in. The step's result
        for it is dropped, and the row's next step computes the same again.
        """
        req, row = scheduled.req, scheduled.row
        batch.leave_out(row)
        self._rows.undo(req, scheduled.start)
        self._lifecycle.kv.give_back_rejected(np.array([row], np.intp))
        for feature in req.features:
            feature.step_undone()
        self.add(scheduled)

    def look(self) -> None:
        """Let the rows continue that can, and retract those that sit for too long. Called once a turn, before
        the next step is built.
        """
        if not self._sitting:
            return
        sitting, self._sitting = self._sitting, []
        for each in sitting:
            row = each.req.row
            if row < 0 or self._rows.stay_of[row] != each.stay:
                continue
            try:
                if self._rows.in_flight_of[row]:
                    self._sitting.append(each._replace(until_s=self._now_s() + MAX_SIT_S))
                elif self._is_ready(each.masked_by):
                    self._rows.join_again(row)
                elif self._now_s() < each.until_s:
                    self._sitting.append(each)
                else:
                    self._lifecycle.retract(each.req)
            except RequestError as error:
                self._lifecycle.finish(each.req, "error", error=error_info(error))
