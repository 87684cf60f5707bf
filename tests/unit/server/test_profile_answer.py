"""Answer of /profiles/{file}: the events of a file of megabytes are copied, a piece at a time."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from pathlib import Path

import pytest

from carousel.server.admin.profiles import PIECE_BYTES, answer_pieces, open_profile

WINDOW = {"begun_us": 9e6, "ended_us": 20e6}
NUM_EVENTS = 30_000
OWN = b'[{"name":"HTTP"}]'


def written(path: Path, num_events: int) -> Path:
    event = {"ph": "X", "name": "build", "pid": 1, "tid": 1, "args": {}, "ts": 0.0, "dur": 1.0}
    trace = {"displayTimeUnit": "ms", "otherData": WINDOW, "traceEvents": [event] * num_events}
    path.write_text(json.dumps(trace, separators=(",", ":")))
    return path


def test_a_profile_of_megabytes_is_answered_a_piece_at_a_time(tmp_path: Path) -> None:
    """Before, 16 calls at once took 318 MB and held the event loop for 180 ms."""
    path = written(tmp_path / "profile", NUM_EVENTS)

    async def largest_piece() -> int:
        found = open_profile(path)
        assert found
        return max([len(piece) async for piece in answer_pieces(found, OWN)])

    tracemalloc.start()
    try:
        largest = asyncio.run(largest_piece())
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert largest <= PIECE_BYTES
    assert peak_bytes < path.stat().st_size / 3


def test_events_of_requests_come_before_those_of_the_scheduler(tmp_path: Path) -> None:
    async def answer() -> bytes:
        found = open_profile(written(tmp_path / "profile", 2))
        assert found
        assert (found.window.begun_us, found.window.ended_us) == (9e6, 20e6)
        return b"".join([piece async for piece in answer_pieces(found, OWN)])

    trace = json.loads(asyncio.run(answer()))
    assert [event["name"] for event in trace["traceEvents"]] == ["HTTP", "build", "build"]
    assert (trace["otherData"], trace["displayTimeUnit"]) == (WINDOW, "ms")


@pytest.mark.parametrize(
    "content", ["", "{}", '{"traceEvents":[]}', "not JSON", '{"otherData":1,"traceEvents":[]}']
)
def test_a_file_that_is_no_profile_yet_is_not_served(tmp_path: Path, content: str) -> None:
    path = tmp_path / "profile"
    assert open_profile(path) is None
    path.write_text(content)
    assert open_profile(path) is None
    whole = written(path, 3).read_bytes()
    for num_bytes in (10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:num_bytes])
        assert open_profile(path) is None
