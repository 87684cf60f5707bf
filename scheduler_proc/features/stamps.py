"""Stamps: records the times of a traced sequence's events, and adds them to its terminal message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from runtime.wire.messages import Closed
from runtime.wire.perf_metrics import MAX_STAMPS, Stamp, StampName, TraceStamps
from scheduler_proc.core.request import Request
from scheduler_proc.core.samples import Sampled
from scheduler_proc.core.scheduled_row import ScheduledRow
from scheduler_proc.features.base import RequestFeature

MAX_ON_THE_WAY = MAX_STAMPS - 8
"""Maximum number of stamps of chunks, rows and retractions. The rest of MAX_STAMPS is for the end of the
sequence.
"""


class Stamps(RequestFeature):
    def __init__(self, req: Request, trace: TraceStamps, clock: Callable[[], float]) -> None:
        self._req = req
        self._trace = trace
        self._clock = clock
        self._stamps: list[Stamp] = []
        self._last: Stamp | None = None
        """Stamp of the last token that this feature has seen."""
        self._row = -1
        self._note("scheduler", req.seq)

    def _note(self, name: StampName, value: int = 0) -> None:
        if len(self._trace.stamps) + len(self._stamps) < MAX_ON_THE_WAY:
            self._stamps.append(Stamp(name, self._clock(), value))

    def row_opened(self, row: int) -> None:
        self._row = row
        self._note("row", max(0, self._req.cached_tokens))

    def plan_chunk(self, row: ScheduledRow[Any]) -> None:
        self._note("chunk", row.start + row.num_known)

    def accept(self, sampled: Sampled) -> list[int]:
        if sampled.ids:
            num_output = self._req.num_output + len(sampled.ids)
            if self._last is None:
                self._note("first_token", num_output)
            self._last = Stamp("last_token", self._clock(), num_output)
        return sampled.ids

    @property
    def is_settled(self) -> bool:
        return True

    def _note_last(self) -> None:
        """Record the last token of the stay, if the feature has not seen it."""
        last = self._req.rows.last_time(self._row) if self._row >= 0 else None
        if last is not None:
            self._last = Stamp("last_token", last[0], self._req.num_output)

    def closing(self, closed: Closed) -> Closed:
        self._note_last()
        ends = [] if self._last is None else [self._last]
        ends.append(Stamp("closed", self._clock(), self._req.num_output))
        return msgspec.structs.replace(closed, trace=self._trace.add(*self._stamps, *ends))

    def row_lost(self) -> None:
        if not self._req.finished:
            self._note_last()
            self._note("retraction")
        self._row = -1


def attach_stamps(clock: Callable[[], float]) -> Callable[[Request], RequestFeature | None]:
    """Return a feature factory that gives Stamps to each sampled request."""

    def attach(req: Request) -> RequestFeature | None:
        return None if req.trace is None else Stamps(req, req.trace, clock)

    return attach
