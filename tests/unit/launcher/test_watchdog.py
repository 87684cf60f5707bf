"""The watchdog tells who hangs from who is slow: a simulated clock, slots written by hand, a real process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.launcher.hosts import local
from runtime.launcher.hosts.host import Child, ProcessPlace
from runtime.launcher.hosts.local import LocalChild
from runtime.launcher.watchdog import Watchdog
from runtime.ring.liveness import is_stopped
from runtime.settings.config import RuntimeConfig
from runtime.wire.status_page import ProcessStatus, StatusPage

CONFIG = RuntimeConfig(device="cpu", stall_timeout=10.0, step_timeout=100.0, start_timeout=50.0)
ROLES = ("worker", "scheduler", "tokenizer")


class Launch:
    """Processes that exist on the page only, and their watchdog. Time is what `run` says."""

    def __init__(self, folder: Path) -> None:
        self.page = StatusPage(folder / "status", create=True)
        self.watchdog = Watchdog(self.page, CONFIG)
        self.now = 1000.0
        self.slots = {role: ProcessStatus(1, number, "ready") for number, role in enumerate(ROLES, 1)}
        self.silent: set[str] = set()
        self.children = [self._child(role) for role in ROLES]

    def _child(self, role: str) -> Child:
        process: Any = SimpleNamespace(pid=self.slots[role].pid)
        return LocalChild(ProcessPlace(role, 0, role), 1, process, -1, started_at=self.now, is_ready=True)

    def run(self, seconds: float, every_s: float = 0.5) -> dict[str, str]:
        """Return what hangs, by role, as soon as something does."""
        end = self.now + seconds
        while self.now < end:
            self.now += every_s
            for role, slot in self.slots.items():
                if role not in self.silent:
                    self.page.write(role, slot._replace(heartbeat_ns=int(self.now * 1e9)))
            hangs = self.watchdog.look(self.children, self.now)
            found = {hang.child.place.role: hang.reason for hang in hangs}
            if found:
                return found
        return {}

    def scheduler_says(self, **fields: Any) -> None:
        self.slots["scheduler"] = self.slots["scheduler"]._replace(**fields)


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    monkeypatch.setattr(local, "is_stopped", lambda pid: False)
    launch = Launch(tmp_path)
    yield launch
    launch.page.close()


def test_nobody_hangs_while_all_loops_turn(launch: Launch) -> None:
    assert launch.run(1000.0, every_s=2.0) == {}


@pytest.mark.parametrize("role", ROLES)
def test_a_loop_that_does_not_turn_hangs(launch: Launch, role: str) -> None:
    assert launch.run(5.0) == {}
    launch.silent.add(role)
    assert launch.run(9.0) == {}
    assert "no turn of its work loop" in launch.run(3.0)[role]


def test_a_worker_in_a_step_has_the_time_of_a_step(launch: Launch) -> None:
    launch.scheduler_says(num_launched=7, num_finished=6, num_running=1)
    launch.silent.add("worker")
    assert launch.run(98.0) == {}
    assert set(launch.run(4.0)) == {"worker", "scheduler"}


def test_steps_that_end_show_that_the_engine_works(launch: Launch) -> None:
    for number in range(1, 10):
        launch.scheduler_says(num_launched=number + 1, num_finished=number, num_running=1)
        assert launch.run(90.0) == {}
    assert "no step has ended" in launch.run(20.0)["scheduler"]


def test_requests_that_wait_for_ever_show_that_it_does_not(launch: Launch) -> None:
    launch.scheduler_says(num_waiting=3)
    assert launch.run(99.0) == {}
    assert "no step has ended" in launch.run(3.0)["scheduler"]


@pytest.mark.parametrize("why", ["is_paused", "is_in_call"])
def test_requests_that_wait_while_no_step_may_be_launched_show_nothing(launch: Launch, why: str) -> None:
    launch.scheduler_says(num_running=1, num_waiting=3, **{why: True})
    assert launch.run(1000.0, every_s=2.0) == {}
    launch.scheduler_says(**{why: False})
    assert launch.run(99.0) == {}
    assert "no step has ended" in launch.run(3.0)["scheduler"]


def test_a_step_begins_its_time_anew_after_idling(launch: Launch) -> None:
    assert launch.run(500.0, every_s=2.0) == {}
    launch.scheduler_says(num_waiting=1)
    assert launch.run(99.0) == {}


def test_a_process_that_is_not_ready_has_the_time_of_a_start(launch: Launch) -> None:
    launch.children[0].is_ready = False
    launch.silent.add("worker")
    assert launch.run(49.0) == {}
    assert "not ready within 50 s" in launch.run(3.0)["worker"]


def test_a_launcher_that_was_held_up_itself_blames_nobody(launch: Launch) -> None:
    launch.run(2.0)
    launch.silent |= set(ROLES)
    assert launch.run(3600.0 * 8, every_s=3600.0) == {}
    launch.silent.clear()
    assert launch.run(60.0) == {}


def test_a_stopped_process_is_named_after_its_time_and_not_when_it_goes_on_before(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: set[int] = set()
    monkeypatch.setattr(local, "is_stopped", lambda pid: pid in stopped)
    for _ in range(5):
        stopped.add(launch.slots["tokenizer"].pid)
        assert launch.run(2.0) == {}
        stopped.clear()
        assert launch.run(1.0) == {}
    stopped.add(launch.slots["tokenizer"].pid)
    assert "stopped" in launch.run(4.0)["tokenizer"]


def test_the_kernel_says_who_is_stopped() -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    try:
        assert not is_stopped(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 10.0
        while not is_stopped(process.pid):
            assert time.monotonic() < deadline
        os.kill(process.pid, signal.SIGCONT)
        while is_stopped(process.pid):
            assert time.monotonic() < deadline
    finally:
        process.kill()
        process.wait()
    assert not is_stopped(process.pid)
