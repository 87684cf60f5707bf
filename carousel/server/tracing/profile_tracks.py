"""Tracks of requests in a profile of steps: for the HTTP server, the tokenizers, the scheduler and the
detokenizers, with an arrow through them for each sequence.

Slices that overlap in time are in different lanes of their process, so that slices of one lane nest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from carousel.client.tracing.phases import phases_of
from carousel.server.tracing.http_spans import HttpSpan, label_digest
from runtime.wire.perf_metrics import Stamp

SCHEDULER, WORKER, HTTP, TOKENIZER, DETOKENIZER = 1, 2, 3, 4, 5
"""`pid` of each process in the trace; the first two are those of the scheduler's own file."""
NAMES = {HTTP: "HTTP", TOKENIZER: "tokenizer", DETOKENIZER: "detokenizer"}
ORDER = (HTTP, TOKENIZER, SCHEDULER, WORKER, DETOKENIZER)
LANES = 1000
"""`tid` of the first lane of process 1, twice that of the first one of process 2, and so on."""


class Slice(NamedTuple):
    name: str
    begin_s: float
    end_s: float
    inner: tuple[Slice, ...] = ()
    """Consecutive slices within this one."""


class TrackStage(NamedTuple):
    """Stay of a sequence in one process."""

    process: int
    slice: Slice


def stages_of(timeline: Mapping[str, Any], http: HttpSpan | None, last_s: float) -> list[TrackStage]:
    """Return the stays of a sequence, ordered by begin. `last_s` is the time at which the detokenizer had the
    end of the request's last sequence; after it the HTTP process only has to answer.
    """
    begin_s, name = timeline["clock_s"], timeline["label"] or timeline["trace_id"]
    stamps = [Stamp(stamp, begin_s + at, value) for stamp, at, value in timeline["stamps"]]
    stages: list[TrackStage] = []
    read_s = first_s = 0.0
    taken_at = -1
    for at, stamp in enumerate(stamps):
        if stamp.name == "tokenizer_in":
            read_s = stamp.at_s
        elif stamp.name == "tokenizer_out":
            stages.append(TrackStage(TOKENIZER, Slice(name, read_s or stamp.at_s, stamp.at_s)))
        elif stamp.name == "scheduler":
            taken_at = at
        elif stamp.name == "first_token":
            first_s = stamp.at_s
        elif stamp.name == "closed" and taken_at >= 0:
            stages.append(TrackStage(SCHEDULER, _in_scheduler(name, stamps[taken_at : at + 1])))
        elif stamp.name == "detokenizer":
            since_s = first_s or stamps[at - 1].at_s
            stages.append(TrackStage(DETOKENIZER, Slice(name, since_s, max(since_s, stamp.at_s))))
    if http is not None:
        answered = Slice("answer", min(last_s, http.answered_s), http.answered_s)
        stages.insert(0, TrackStage(HTTP, Slice(name, http.received_s, http.answered_s, (answered,))))
    return stages


def _in_scheduler(name: str, stamps: Sequence[Stamp]) -> Slice:
    begin_s, end_s = stamps[0].at_s, stamps[-1].at_s
    # Its wait begins when the scheduler receives it.
    waits = Stamp("tokenizer_out", begin_s)
    phases = list(phases_of([waits, *stamps[1:]], begin_s, end_s))[1:]
    inner = tuple(Slice(p.name, p.start_s, p.end_s) for p in phases if p.name != "deliver")
    return Slice(name, begin_s, end_s, inner)


class Lanes:
    """Assigns overlapping slices to different lanes."""

    def __init__(self) -> None:
        self._free_at: dict[int, list[float]] = {}

    def take(self, process: int, begin_s: float, end_s: float) -> int:
        """Return the first lane of the process that is free at begin_s. Call it in the order of begin_s."""
        lanes = self._free_at.setdefault(process, [])
        for lane, free_at in enumerate(lanes):
            if free_at <= begin_s:
                lanes[lane] = end_s
                return lane
        lanes.append(end_s)
        return len(lanes) - 1


def events_of_requests(
    window: Mapping[str, float],
    timelines: Iterable[Mapping[str, Any]],
    spans: Mapping[bytes, Sequence[HttpSpan]],
) -> list[dict[str, Any]]:
    """Return the events of the sequences in `timelines` that existed during the window of a profile, and of
    their tracks.
    """
    begun_s, ended_s = window["begun_us"] / 1e6, window["ended_us"] / 1e6
    found: list[tuple[Mapping[str, Any], HttpSpan | None]] = []
    last_s: dict[HttpSpan | None, float] = {}
    for timeline in timelines:
        begin_s = timeline["clock_s"]
        end_s = begin_s + timeline["stamps"][-1][1]
        if begin_s <= ended_s and end_s >= begun_s:
            own = spans.get(label_digest(timeline["label"]), ())
            http = next(
                (each for each in own if each.received_s <= begin_s and end_s <= each.answered_s), None
            )
            found.append((timeline, http))
            last_s[http] = max(last_s.get(http, 0.0), end_s)
    journeys = [stages_of(timeline, http, last_s[http]) for timeline, http in found]
    return [*_names(), *_events(journeys)]


def _names() -> Iterator[dict[str, Any]]:
    for process, name in NAMES.items():
        yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    for place, process in enumerate(ORDER):
        yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": place}}


def _events(journeys: Sequence[Sequence[TrackStage]]) -> Iterator[dict[str, Any]]:
    lanes, lane_of, named = Lanes(), dict[TrackStage, int](), set[int]()
    # Sequences of one request share its stays in the HTTP process and the tokenizer.
    stages = {stage: None for journey in journeys for stage in journey}
    for stage in sorted(stages, key=lambda stage: stage.slice.begin_s):
        process, piece = stage
        lane = process * LANES + lanes.take(process, piece.begin_s, piece.end_s)
        if lane not in named:
            named.add(lane)
            about = {"name": "requests"}
            yield {"ph": "M", "name": "thread_name", "pid": process, "tid": lane, "args": about}
        lane_of[stage] = lane
        for each in (piece, *piece.inner):
            yield _slice(process, lane, each)
    for number, journey in enumerate(journeys):
        yield from _arrow(number, [(stage, lane_of[stage]) for stage in journey])


def _slice(process: int, lane: int, piece: Slice) -> dict[str, Any]:
    begin_us, end_us = piece.begin_s * 1e6, piece.end_s * 1e6
    return {"ph": "X", "cat": "request", "name": piece.name, "pid": process, "tid": lane} | {
        "ts": begin_us,
        "dur": end_us - begin_us,
    }


def _arrow(number: int, stages: Sequence[tuple[TrackStage, int]]) -> Iterator[dict[str, Any]]:
    """Yield the events of an arrow from the begin of each stay to that of the next, and to the answer."""
    points = [(stage.process, lane, stage.slice.begin_s) for stage, lane in stages]
    if stages and stages[0][0].slice.inner and stages[0][0].process == HTTP:
        stage, lane = stages[0]
        points.append((stage.process, lane, stage.slice.inner[-1].begin_s))
    for at, (process, lane, begin_s) in enumerate(points):
        kind = "s" if at == 0 else "f" if at == len(points) - 1 else "t"
        event = {"ph": kind, "cat": "request", "name": "request", "id": number + 1, "bp": "e"}
        yield event | {"pid": process, "tid": lane, "ts": begin_s * 1e6}
