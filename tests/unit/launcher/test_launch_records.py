"""Records of a launch in its run directory: written in order, by a thread that may be held up."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime.launcher import launch_records
from runtime.launcher.launch_records import LaunchRecords
from runtime.ring.endpoints import Endpoints
from runtime.ring.launch_state import LaunchState
from tests.harness.ring.launched import wait_until

WAIT_S = 20.0


class Disk:
    """Writes no state until it is told to, and keeps what it has written, with the events there were then."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._events_file = endpoints.events_file
        self.answers = threading.Event()
        self.was_asked = threading.Event()
        self.written: list[tuple[str, list[str]]] = []

    def write_atomically(self, _: Path, data: bytes) -> None:
        self.was_asked.set()
        assert self.answers.wait(WAIT_S)
        self.written.append((json.loads(data)["state"], [event["event"] for event in self.events()]))

    def events(self) -> list[dict[str, Any]]:
        return list(map(json.loads, self._events_file.read_text().splitlines()))


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk(Endpoints(tmp_path))
    monkeypatch.setattr(launch_records, "write_atomically", disk.write_atomically)
    return disk


@pytest.fixture
def records(disk: Disk, tmp_path: Path) -> Iterator[LaunchRecords]:
    """Make the records of a launch whose first state is being written."""
    records = LaunchRecords(Endpoints(tmp_path))
    records.state(launch_state("first"))
    assert disk.was_asked.wait(WAIT_S)
    yield records
    disk.answers.set()
    records.close()
    records._thread.join(WAIT_S)
    assert not records._thread.is_alive()


def launch_state(state: str) -> LaunchState:
    return LaunchState("launch", state, 1, 2, 3, "::1", 4, "", "model", [], {}, {}, "", 0)


def test_events_come_in_order_and_of_the_states_that_wait_the_newest(
    records: LaunchRecords, disk: Disk
) -> None:
    for name in "abc":
        records.event(name)
        records.state(launch_state(f"after {name}"))
    disk.answers.set()
    assert records.close()
    assert disk.written == [("first", []), ("after c", ["a", "b", "c"])]


def test_what_waits_for_a_disk_is_bounded_and_what_is_lost_counted(
    records: LaunchRecords, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_records, "MAX_EVENTS", 2)
    for number in range(5):
        records.event("spawn", pid=number, code=None)
    disk.answers.set()
    assert records.close()
    said = [{name: event[name] for name in event if name != "time"} for event in disk.events()]
    assert said == [
        {"event": "spawn", "pid": 0},
        {"event": "spawn", "pid": 1},
        {"event": "lost", "events": 3},
    ]


def test_the_end_waits_for_a_disk_that_hangs_once_and_not_for_ever(
    records: LaunchRecords, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_records, "MAX_WAIT_S", 0.01)
    assert not records.wait_written()
    monkeypatch.setattr(launch_records, "MAX_WAIT_S", 3600.0)
    assert not records.wait_written()
    assert not records.close()


def test_a_disk_that_has_caught_up_is_waited_for_again(
    records: LaunchRecords, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_records, "MAX_WAIT_S", 0.01)
    assert not records.wait_written()
    monkeypatch.setattr(launch_records, "MAX_WAIT_S", WAIT_S)
    disk.answers.set()
    wait_until(records.wait_written, WAIT_S, "it has caught up")
    for _ in range(100):
        records.state(launch_state("next"))
        assert records.wait_written()
