"""Which deaths of its processes a launch repairs, after which pause, and which it counts against requests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.base.errors import StartError
from runtime.launcher.hosts.host import ProcessPlace
from runtime.launcher.hosts.local import LocalChild
from runtime.launcher.supervisor import Supervisor
from runtime.ring.process import FIRST_EPOCH
from runtime.ring.suspects.roster import Roster, Suspects, suspect_of
from runtime.settings.config import RuntimeConfig
from runtime.wire.handle import make_handle
from runtime.wire.messages import ProcessFailed
from runtime.wire.status_page import ProcessStatus
from tests.cpu.launcher.test_supervisor import adopt, started


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    with started(RuntimeConfig(run_dir=str(tmp_path / "run"), no_http=True)) as supervisor:
        yield supervisor


@pytest.mark.parametrize(
    ("state", "num_signals", "has_failed"),
    [
        ("ready", 0, True),
        ("ready", 1, True),
        ("draining", 1, True),
        ("draining", 2, False),
        ("loading", 0, True),
        ("loading", 1, False),
    ],
)
def test_a_death_that_nobody_replaces_ends_a_launch_also_while_it_drains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, num_signals: int, has_failed: bool
) -> None:
    """Requests that it held can never finish, so there is nothing to wait for."""
    with started(RuntimeConfig(run_dir=str(tmp_path / "run"), no_http=True, restart="never")) as supervisor:
        supervisor._status.enter(state)
        supervisor._signals.num_stops = num_signals
        monkeypatch.setattr(supervisor._restarts, "reap", lambda child: -signal.SIGKILL)
        process: Any = SimpleNamespace(pid=1)
        supervisor._on_exit(
            LocalChild(ProcessPlace("detokenizer", 0, "detokenizer"), 1, process, -1, is_ready=True)
        )
        assert (supervisor._status.failure is not None) == has_failed


def test_an_engine_that_cannot_load_again_ends_the_launch_however_long_it_takes_to_say_so(
    tmp_path: Path,
) -> None:
    """Each of its deaths is past the window of the one before it. One that has served is started again."""
    sizes: dict[str, Any] = {"restart_window": 1e-9, "max_engine_restarts": 2}
    dead: Any = SimpleNamespace(pid=1)
    failure = ProcessFailed("scheduler", "out of memory: take a narrower --dtype", 64)
    with started(RuntimeConfig(run_dir=str(tmp_path / "run"), no_http=True, **sizes)) as supervisor:
        supervisor._status.enter("ready")
        for is_ready in (True, True, True, False, False):
            assert supervisor._status.failure is None
            scheduler = LocalChild(ProcessPlace("scheduler", 0, "scheduler"), 1, dead, -1, is_ready=is_ready)
            supervisor._restarts.note_last_words(failure)
            supervisor._restarts.replace(scheduler, failure.exit_code)
        ended = supervisor._status.failure
        assert ended is not None
        assert ended.message == f"{failure.message}; restarted 2 times without getting ready"


def test_the_launcher_gives_signs_of_life_while_a_process_takes_its_time_to_end(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To give back hundreds of gigabytes takes longer than clients wait for one."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    worker = LocalChild(
        ProcessPlace("worker", 0, "worker"), 1, process, os.pidfd_open(process.pid), is_ready=True
    )
    adopt(supervisor, worker)
    supervisor._status.enter("ready")
    has_beaten = threading.Event()

    def end_after_a_beat(before: int) -> None:
        deadline = time.monotonic() + 20.0
        while time.monotonic() < deadline and not has_beaten.is_set():
            if supervisor.names.page.read("launcher").heartbeat_ns > before:
                has_beaten.set()
            time.sleep(0.005)
        process.kill()

    def kill() -> None:
        before = supervisor.names.page.read("launcher").heartbeat_ns
        threading.Thread(target=end_after_a_beat, args=(before,)).start()

    monkeypatch.setattr(worker, "kill", kill)
    dead: Any = SimpleNamespace(pid=1)
    scheduler = LocalChild(ProcessPlace("scheduler", 0, "scheduler"), 1, dead, -1, is_ready=True)
    supervisor._restarts.replace(scheduler, -signal.SIGSEGV)
    assert has_beaten.is_set()
    assert process.returncode == -signal.SIGKILL


def test_nothing_is_started_once_a_launch_ends_at_once(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A place that was empty when the signals came stays so."""
    started: list[ProcessPlace] = []
    monkeypatch.setattr(supervisor._restarts, "start", started.append)
    supervisor._status.enter("ready")
    supervisor._children.due[ProcessPlace("api", 0, "api")] = 0.0
    for _ in range(2):
        supervisor._signals._stop()
    supervisor._turn()
    assert not started


@pytest.mark.parametrize("num_failures", [2, 9])
def test_what_the_system_has_no_process_for_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_failures: int
) -> None:
    """Somebody else may have all that there may be, or all memory, for a moment; a server lives longer."""
    failures = iter(range(num_failures))
    tried: list[ProcessPlace] = []

    def start(place: ProcessPlace) -> None:
        tried.append(place)
        if next(failures, None) is not None:
            raise StartError(f"{place.name} cannot be started: Resource temporarily unavailable")

    monkeypatch.setattr("runtime.launcher.deaths.restart_budget.BACK_OFF_S", (0.0,))
    with started(RuntimeConfig(run_dir=str(tmp_path / "run"), no_http=True, max_restarts=3)) as supervisor:
        supervisor._status.enter("ready")
        monkeypatch.setattr(supervisor._restarts, "start", start)
        place = ProcessPlace("tokenizer", 0, "tokenizer")
        supervisor._children.due[place] = 0.0
        for _ in range(5):
            supervisor._restarts.start_due()
        assert tried == [place] * min(num_failures + 1, 4)
        assert not supervisor._children.due
        assert (supervisor._status.failure is not None) == (num_failures > 3)


def engine(supervisor: Supervisor, state: str, end: str = "SEGV") -> list[LocalChild]:
    """Processes in the place of worker and scheduler; their slots say `state`, no message did. The worker
    ends by the signal `end`.
    """
    children = []
    for role, command in (("worker", f"kill -{end} $$"), ("scheduler", "exec sleep 60")):
        process = subprocess.Popen(["sh", "-c", command])
        child = LocalChild(ProcessPlace(role, 0, role), FIRST_EPOCH, process, os.pidfd_open(process.pid))
        adopt(supervisor, child)
        supervisor.names.page.write(role, ProcessStatus(FIRST_EPOCH, child.pid, state))
        children.append(child)
    return children


KEY = suspect_of(make_handle(7, 1))


@pytest.mark.parametrize("state", ["ready", "loading"])
def test_a_death_counts_if_requests_could_be_there_whatever_the_launcher_has_heard(
    supervisor: Supervisor, state: str
) -> None:
    """Clients see in the slot that the engine is ready, and the launcher may be late to read its message."""
    endpoints = supervisor.names.endpoints
    Roster.create(endpoints.roster_file, 4).add(KEY)
    supervisor._status.enter("ready")
    for _ in range(2):
        worker, scheduler = engine(supervisor, state)
        worker.process.wait()
        supervisor._on_exit(worker)
        assert scheduler.process.poll() == -signal.SIGKILL
    assert Suspects.read(endpoints.suspects_file).alone.keys() == ({KEY} if state == "ready" else set())
    before = time.monotonic_ns()
    supervisor._status.beat()
    assert supervisor.names.page.read("launcher").recovery_ns >= before


def test_who_came_past_a_death_in_an_engine_that_was_killed_is_not_suspected_again(
    supervisor: Supervisor,
) -> None:
    endpoints = supervisor.names.endpoints
    supervisor._status.enter("ready")
    for end, past in (("SEGV", ()), ("KILL", (KEY,))):
        roster = Roster.create(endpoints.roster_file, 4)
        roster.add(KEY)
        for key in past:
            roster.note_past(key)
        worker, _ = engine(supervisor, "ready", end)
        worker.process.wait()
        supervisor._on_exit(worker)
        assert Suspects.read(endpoints.suspects_file).watched.keys() == {KEY}.difference(past)


@pytest.mark.parametrize(("command", "delays"), [("kill -KILL $$", [0, 0, 0]), ("exit 1", [0, 0.1, 0.4])])
def test_a_pause_comes_before_what_has_died_by_itself_and_not_before_what_was_killed(
    supervisor: Supervisor, command: str, delays: list[float]
) -> None:
    supervisor._status.enter("ready")
    for _ in delays:
        process = subprocess.Popen(["sh", "-c", command])
        child = LocalChild(
            ProcessPlace("tokenizer", 0, "tokenizer"), FIRST_EPOCH, process, os.pidfd_open(process.pid)
        )
        adopt(supervisor, child)
        process.wait()
        supervisor._on_exit(child)
    assert supervisor.names.records.wait_written()
    events = map(json.loads, supervisor.names.endpoints.events_file.read_text().splitlines())
    assert [event["delay"] for event in events if event["event"] == "restart"] == delays
