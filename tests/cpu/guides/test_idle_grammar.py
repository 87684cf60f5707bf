"""The rest of an idle grammar process: it shows that it is alive, and does nothing else."""

from __future__ import annotations

import pytest

from grammar_proc import main
from runtime.ring.process import HEARTBEAT_S


class FakeTime:
    """Clock that stands still between polls, and a poll that finds something after `found_after` of them."""

    def __init__(self, found_after: int) -> None:
        self.now_s = 100.0
        self.polls_ms: list[int] = []
        self.beats_s: list[float] = []
        self._found_after = found_after

    def monotonic(self) -> float:
        return self.now_s

    def poll(self, timeout_ms: int) -> bool:
        self.polls_ms.append(timeout_ms)
        self.now_s += timeout_ms / 1000
        return len(self.polls_ms) == self._found_after

    def beat(self) -> None:
        self.beats_s.append(self.now_s)


def rested(monkeypatch: pytest.MonkeyPatch, wait_s: float, found_after: int = 0) -> FakeTime:
    clock = FakeTime(found_after)
    monkeypatch.setattr(main, "time", clock)
    main.rest(wait_s, clock.beat, clock.poll)
    return clock


def test_it_beats_in_time_for_as_long_as_it_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = rested(monkeypatch, 1.0)
    assert clock.now_s == pytest.approx(101.0)
    gaps = [after - before for before, after in zip(clock.beats_s, clock.beats_s[1:], strict=False)]
    assert gaps[0] <= HEARTBEAT_S / 2  # the first beat shows nothing if half a heartbeat is not over
    assert max(gaps) <= HEARTBEAT_S
    assert len(clock.beats_s) == len(clock.polls_ms) == 5


def test_it_stops_resting_when_something_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(rested(monkeypatch, 1.0, found_after=2).polls_ms) == 2


@pytest.mark.parametrize(("wait_s", "expected"), [(0.0, [0]), (0.02, [20]), (0.0004, [1])])
def test_a_short_rest_is_one_poll(
    monkeypatch: pytest.MonkeyPatch, wait_s: float, expected: list[int]
) -> None:
    assert rested(monkeypatch, wait_s).polls_ms == expected
