"""When a launch that ends has answered everything."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.launcher import drain
from runtime.launcher.drain import Drain
from runtime.wire.status_page import ProcessStatus, StatusPage


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(drain, "time", clock)
    return clock


@pytest.fixture
def page(tmp_path: Path) -> StatusPage:
    return StatusPage(tmp_path / "status", create=True, counts={"api": 2})


def test_an_idle_launch_ends_when_that_is_sure(page: StatusPage, clock: Clock) -> None:
    waiting = Drain(page, 30.0)
    assert not waiting.look(False)
    clock.now += drain.SETTLED_S
    assert waiting.look(False)
    assert not waiting.was_cut


def test_a_request_in_several_places_is_one(page: StatusPage) -> None:
    for role in ("scheduler", "detokenizer", "api"):
        page.write(role, ProcessStatus(num_running=1))
    page.write("api", ProcessStatus(num_running=2), 1)
    assert Drain(page, 30.0).num_left() == 3


@pytest.mark.parametrize(
    ("role", "index", "status"),
    [
        ("scheduler", 0, ProcessStatus(num_running=1)),
        ("scheduler", 0, ProcessStatus(num_waiting=1)),
        ("detokenizer", 0, ProcessStatus(num_running=1)),
        ("api", 1, ProcessStatus(num_running=1)),
        ("tokenizer", 0, ProcessStatus(num_running=1)),
    ],
)
def test_whoever_still_has_something_to_answer_is_waited_for(
    page: StatusPage, clock: Clock, role: str, index: int, status: ProcessStatus
) -> None:
    page.write(role, status, index)
    waiting = Drain(page, 30.0)
    for _ in range(20):
        clock.now += 1.0
        assert not waiting.look(False)
    page.write(role, ProcessStatus(), index)
    assert not waiting.look(False)
    clock.now += drain.SETTLED_S
    assert waiting.look(False)
    assert not waiting.was_cut


def test_requests_that_take_longer_than_they_have_are_cut(page: StatusPage, clock: Clock) -> None:
    page.write("scheduler", ProcessStatus(num_running=1))
    waiting = Drain(page, 30.0)
    clock.now += 29.0
    assert not waiting.look(False)
    clock.now += 1.0
    assert waiting.look(False)
    assert waiting.was_cut


def test_a_second_signal_ends_it(page: StatusPage, clock: Clock) -> None:
    page.write("scheduler", ProcessStatus(num_running=1))
    waiting = Drain(page, 30.0)
    assert not waiting.look(False)
    assert waiting.look(True)
    assert waiting.was_cut


def test_who_waits_for_nobody_cuts_nobody(page: StatusPage, clock: Clock) -> None:
    page.write("scheduler", ProcessStatus(num_running=1))
    waiting = Drain(page, 0.0)
    assert waiting.look(False)
    assert not waiting.was_cut
