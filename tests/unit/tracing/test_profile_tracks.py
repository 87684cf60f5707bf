"""Requests in a profile: stays of sequences in processes, laid in lanes, and arrows through them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from carousel.server.admin.metrics import Metrics
from carousel.server.tracing.http_spans import NUM_KEPT, HttpSpan, HttpSpans, label_digest
from carousel.server.tracing.profile_tracks import HTTP, SCHEDULER, Lanes, events_of_requests

WINDOW = {"begun_us": 9e6, "ended_us": 20e6}
STAMPS = (
    *(("tokenizer_in", 0.0), ("tokenizer_out", 0.1), ("scheduler", 0.2), ("row", 0.3), ("chunk", 0.3)),
    *(("first_token", 0.5), ("retraction", 0.6), ("row", 0.8), ("last_token", 1.0), ("closed", 1.0)),
    ("detokenizer", 1.1),
)


def timeline(label: str, clock_s: float, index: int = 0) -> dict[str, Any]:
    stamps = [[name, at, 0] for name, at in STAMPS]
    return {"label": label, "trace_id": "t", "clock_s": clock_s, "index": index, "stamps": stamps}


def slices(events: list[dict[str, Any]], process: int) -> list[tuple[str, float, float]]:
    """Name, begin and end of the slices of a process, in milliseconds since the profile began."""
    return [
        (event["name"], round(event["ts"] / 1e3 - 9e3), round((event["ts"] + event["dur"]) / 1e3 - 9e3))
        for event in events
        if event["ph"] == "X" and event["pid"] == process
    ]


def test_two_sequences_of_a_request_share_what_is_before_them() -> None:
    pair = [timeline("a", 10.0, index) for index in range(2)]
    events = events_of_requests(WINDOW, pair, {label_digest("a"): [HttpSpan(9.9, 11.2)]})
    assert slices(events, HTTP) == [("a", 900, 2200), ("answer", 2100, 2200)]
    inner = [("queue", 1200, 1300), ("prefill", 1300, 1500), ("decode", 1500, 1600)]
    inner += [("queue", 1600, 1800), ("decode", 1800, 2000)]
    assert slices(events, SCHEDULER) == [("a", 1200, 2000), *inner]
    arrows = [event["ph"] for event in events if event["ph"] in "stf"]
    assert arrows == [*"stttf"] * 2


def test_what_lived_at_another_time_is_left_out_and_so_is_a_span_of_another_request() -> None:
    others = [timeline("a", 1.0), timeline("a", 21.0)]
    assert slices(events_of_requests(WINDOW, others, {}), SCHEDULER) == []
    events = events_of_requests(WINDOW, [timeline("a", 8.0)], {label_digest("a"): [HttpSpan(1.0, 2.0)]})
    assert slices(events, HTTP) == []
    assert len(slices(events, SCHEDULER)) == 6


def test_what_overlaps_gets_a_lane_of_its_own() -> None:
    lanes = Lanes()
    taken = [lanes.take(1, begin, end) for begin, end in ((0, 3), (1, 2), (2, 4), (3, 5))]
    assert taken == [0, 1, 1, 0]
    assert lanes.take(2, 0, 1) == 0


def test_spans_of_all_http_processes_are_read_and_the_last_are_kept(tmp_path: Path) -> None:
    one, other = HttpSpans(tmp_path, 0), HttpSpans(tmp_path, 1)
    for number in range(NUM_KEPT + 3):
        one.note([f"x{number}"], number + 1.0, number + 2.0)
    other.note(["p_0", "p_1"], 5.0, 6.0)
    found = one.read()
    assert len(found) == NUM_KEPT + 2
    assert label_digest("x2") not in found
    assert found[label_digest("p_1")] == [HttpSpan(5.0, 6.0)]
    # One in the place of a process that has died goes on with its file.
    assert label_digest("x3") in HttpSpans(tmp_path, 0).read()


def test_a_full_disk_is_told_with_the_file_that_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launch ends with what the process says: which disk is full."""

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    for make, name in ((HttpSpans, "http_spans0"), (lambda folder: Metrics("m", folder), "metrics0")):
        with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/{name}'"):
            make(tmp_path)
