"""Timelines: stamps of the sampled sequences that ended last, to be queried by request label or
all together.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import islice

from msgspec import Struct
from msgspec.structs import replace

from runtime.wire.handle import attempt_of, split_handle
from runtime.wire.messages import Closed, Finish
from runtime.wire.perf_metrics import Stamp

MAX_KEPT = 1000
PAGE_SIZE = 100
"""Maximum number of timelines in an answer to a query for all."""


class Timeline(Struct, frozen=True):
    """Stamps of one sequence, without its text."""

    label: str
    trace_id: str
    index: int
    """Index of the sequence in its request."""
    attempt: int
    """Number of times that the sequence was submitted again."""
    started_s: float
    """Time of the first stamp, in seconds since 1970."""
    clock_s: float
    """Time of the first stamp, on CLOCK_MONOTONIC of the serving machine."""
    reason: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    stamps: list[tuple[str, float, int]]
    """Stamps as (name, seconds since the first, value): see runtime.wire.perf_metrics.Stamp."""
    number: int = 0
    """Number of the timeline in this detokenizer."""


class Timelines:
    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        max_kept: int = MAX_KEPT,
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._kept: deque[Timeline] = deque(maxlen=max_kept)
        self._num_added = 0

    def add(self, label: str, handle: bytes, finish: Finish) -> None:
        """Keep the timeline of a sequence that has ended, if it was sampled."""
        trace = finish.trace
        if trace is None or not trace.stamps:
            return
        first_s = min(stamp.at_s for stamp in trace.stamps)
        usage = finish.usage
        self._num_added += 1
        self._kept.append(
            Timeline(
                label,
                trace.context[:16].hex(),
                split_handle(handle)[2],
                attempt_of(handle),
                self._wall_clock() - (self._clock() - first_s),
                first_s,
                finish.reason,
                usage.prompt_tokens,
                usage.cached_tokens,
                usage.completion_tokens,
                [(stamp.name, stamp.at_s - first_s, stamp.value) for stamp in trace.stamps],
                self._num_added,
            )
        )

    def of(self, label: str) -> list[Timeline]:
        """Return the timelines of sequences whose requests have this label, the oldest first."""
        return [timeline for timeline in self._kept if timeline.label == label]

    def after(self, number: int) -> list[Timeline]:
        """Return the next PAGE_SIZE timelines after this number, the oldest first."""
        num_new = min(max(0, self._num_added - number), len(self._kept))
        begin = len(self._kept) - num_new
        return list(islice(self._kept, begin, begin + PAGE_SIZE))


def stamped(closed: Closed, now: float) -> Closed:
    """Return the end of a sequence with the stamp of this process, if it is sampled. now: time at which the
    turn began, perhaps before the scheduler sent it.
    """
    if closed.trace is None:
        return closed
    at_s = max(now, *(stamp.at_s for stamp in closed.trace.stamps[-1:]))
    return replace(closed, trace=closed.trace.add(Stamp("detokenizer", at_s)))
