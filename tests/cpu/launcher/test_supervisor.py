"""In which order a launch says how it is; which deaths of the engine it counts against requests."""

from __future__ import annotations

import errno
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from runtime.base.errors import ConfigError, StartError
from runtime.launcher import launch_records
from runtime.launcher.hosts.host import Child, ProcessPlace
from runtime.launcher.hosts.local import LocalChild, LocalHost
from runtime.launcher.launch_names import LaunchNames
from runtime.launcher.supervisor import Supervisor
from runtime.ring.process import FIRST_EPOCH
from runtime.ring.suspects.roster import Roster, Suspects, suspect_of
from runtime.settings.config import RuntimeConfig
from runtime.wire.handle import make_handle
from runtime.wire.messages import ProcessFailed
from runtime.wire.status_page import ProcessStatus
from tests.harness.ring.launched import wait_until


@contextmanager
def started(config: RuntimeConfig) -> Iterator[Supervisor]:
    """Supervisor of a launch that has started no process yet."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    supervisor = Supervisor(config)
    try:
        yield supervisor
    finally:
        supervisor.names.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def adopt(supervisor: Supervisor, child: LocalChild) -> None:
    """Have it as if the launch had started it."""
    child.poller = supervisor._poller
    supervisor._poller.register(child.pidfd, zmq.POLLIN)
    supervisor._children._running[child.place] = child


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    with started(RuntimeConfig(run_dir=str(tmp_path / "run"), no_http=True)) as supervisor:
        yield supervisor


@pytest.mark.parametrize(("state", "slot_is_first"), [("ready", True), ("failed", False)])
def test_the_slot_says_ready_before_the_file_and_failed_after_it(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch, state: str, slot_is_first: bool
) -> None:
    """A request by whoever reads "ready" in the file is served, and who sees "failed" finds the reason."""
    in_slot = []

    def write(_: Path, data: bytes) -> None:
        assert json.loads(data)["state"] == state
        in_slot.append(supervisor.names.page.read("launcher").state)

    monkeypatch.setattr(launch_records, "write_atomically", write)
    supervisor._set_state(state)
    assert in_slot == [state if slot_is_first else "absent"]
    assert supervisor.names.page.read("launcher").state == state


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
        supervisor._set_state(state)
        supervisor._num_signals = num_signals
        monkeypatch.setattr(supervisor, "_reap", lambda child: -signal.SIGKILL)
        process: Any = SimpleNamespace(pid=1)
        supervisor._on_exit(
            LocalChild(ProcessPlace("detokenizer", 0, "detokenizer"), 1, process, -1, is_ready=True)
        )
        assert (supervisor._failure is not None) == has_failed


def test_an_engine_that_cannot_load_again_ends_the_launch_however_long_it_takes_to_say_so(
    tmp_path: Path,
) -> None:
    """Each of its deaths is past the window of the one before it. One that has served is started again."""
    sizes: dict[str, Any] = {"restart_window": 1e-9, "max_engine_restarts": 2}
    dead: Any = SimpleNamespace(pid=1)
    failure = ProcessFailed("scheduler", "out of memory: take a narrower --dtype", 64)
    with started(RuntimeConfig(run_dir=str(tmp_path / "run"), no_http=True, **sizes)) as supervisor:
        supervisor._set_state("ready")
        for is_ready in (True, True, True, False, False):
            assert supervisor._failure is None
            scheduler = LocalChild(ProcessPlace("scheduler", 0, "scheduler"), 1, dead, -1, is_ready=is_ready)
            supervisor._restart(scheduler, failure.exit_code, failure)
        assert supervisor._failure is not None
        assert supervisor._failure.message == f"{failure.message}; restarted 2 times without getting ready"


def test_the_launcher_gives_signs_of_life_while_a_process_takes_its_time_to_end(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To give back hundreds of gigabytes takes longer than clients wait for one."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    worker = LocalChild(
        ProcessPlace("worker", 0, "worker"), 1, process, os.pidfd_open(process.pid), is_ready=True
    )
    adopt(supervisor, worker)
    supervisor._set_state("ready")
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
    supervisor._restart(scheduler, -signal.SIGSEGV, ProcessFailed("scheduler", "it faulted", 70))
    assert has_beaten.is_set()
    assert process.returncode == -signal.SIGKILL


def test_a_disk_that_hangs_keeps_nobody_from_being_replaced(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(launch_records, "write_atomically", lambda *_: answers.wait(20.0))
    monkeypatch.setattr(launch_records, "MAX_WAIT_S", 0.01)
    supervisor._set_state("ready")
    process = subprocess.Popen(["sh", "-c", "kill -KILL $$"])
    child = LocalChild(
        ProcessPlace("tokenizer", 0, "tokenizer"), FIRST_EPOCH, process, os.pidfd_open(process.pid)
    )
    adopt(supervisor, child)
    started: list[ProcessPlace] = []
    monkeypatch.setattr(supervisor, "_start_child", started.append)
    process.wait()
    supervisor._turn()
    is_late = not supervisor.names.records.wait_written()
    answers.set()
    wait_until(supervisor.names.records.wait_written, 5.0, "all is written")
    assert started == [child.place]
    assert is_late


@pytest.mark.parametrize("state", ["ready", "draining"])
def test_what_a_second_signal_has_killed_is_not_started_again(
    supervisor: Supervisor, caplog: pytest.LogCaptureFixture, state: str
) -> None:
    """It may come before the drain begins: the launcher kills all there is, and sees them end."""
    caplog.set_level(logging.INFO)
    supervisor._set_state(state)
    process = subprocess.Popen(["sleep", "60"])
    child = LocalChild(
        ProcessPlace("api", 0, "api"), FIRST_EPOCH, process, os.pidfd_open(process.pid), is_ready=True
    )
    adopt(supervisor, child)
    supervisor.names.page.write("api", ProcessStatus(FIRST_EPOCH, child.pid, "ready"))
    for _ in range(2):
        supervisor._on_signal()
    process.wait()
    supervisor._turn()
    assert supervisor._children.get(child.place) is None
    assert supervisor._failure is None
    assert not supervisor._due
    assert supervisor.names.page.read("api").state == "ready"  # as it has left it, not "restarting"
    assert "restarting" not in caplog.text


def test_a_signal_is_heard_at_once(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not when the wait for something else is over."""
    monkeypatch.setattr("runtime.launcher.supervisor.POLL_S", 60.0)
    began = time.monotonic()
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
    supervisor._turn()
    assert supervisor._stopping
    assert time.monotonic() - began < 30.0


def test_nothing_is_started_once_a_launch_ends_at_once(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A place that was empty when the signals came stays so."""
    started: list[ProcessPlace] = []
    monkeypatch.setattr(supervisor, "_start_child", started.append)
    supervisor._set_state("ready")
    supervisor._due[ProcessPlace("api", 0, "api")] = 0.0
    for _ in range(2):
        supervisor._on_signal()
    supervisor._turn()
    assert not started


def test_two_signals_before_there_is_any_process_end_it_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user who has seen the mistake presses Ctrl-C until something happens."""

    def names_that_take_their_time(config: RuntimeConfig) -> LaunchNames:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        return LaunchNames(config)

    monkeypatch.setattr("runtime.launcher.supervisor.LaunchNames", names_that_take_their_time)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        assert Supervisor(RuntimeConfig(run_dir=str(tmp_path / "run"), no_http=True)).run() == 0
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert not (tmp_path / "run").exists()


def test_a_process_that_is_being_let_go_of_is_not_killed(supervisor: Supervisor) -> None:
    """A signal's handler may run at any moment, and its descriptor is another's soon."""
    process = subprocess.Popen(["true"])
    child = LocalChild(
        ProcessPlace("tokenizer", 0, "tokenizer"), FIRST_EPOCH, process, os.pidfd_open(process.pid)
    )
    adopt(supervisor, child)
    let_go = child.reap
    killed: list[Child] = []

    def reap() -> int:
        code = let_go()
        killed.extend(supervisor._children)
        return code

    child.reap = reap  # type: ignore[method-assign]
    assert supervisor._children.reap(child) == 0
    assert not killed


@pytest.mark.parametrize("how", ["ended", "killed", "polled"])
def test_a_process_takes_along_what_it_has_started(how: str) -> None:
    """Compilers, which went on for a minute after Ctrl-C in a first start."""
    command = f"sleep 60 & echo $!; {'' if how == 'ended' else 'sleep 60'}"
    process = subprocess.Popen(["sh", "-c", command], process_group=0, stdout=subprocess.PIPE)
    assert process.stdout is not None
    started = os.pidfd_open(int(process.stdout.readline()))
    process.stdout.close()
    child = LocalChild(ProcessPlace("worker", 0, "worker"), FIRST_EPOCH, process, os.pidfd_open(process.pid))
    if how == "killed":
        child.kill()
    if how == "polled":
        process.send_signal(signal.SIGKILL)
        assert child.has_ended(20.0)
        assert child.poll() == -signal.SIGKILL
    assert child.reap() == (0 if how == "ended" else -signal.SIGKILL)
    poll = select.poll()
    poll.register(started, select.POLLIN)
    assert poll.poll(20_000), "what it has started runs on"
    os.close(started)


def test_the_end_of_a_parent_is_seen_though_nobody_has_reaped_it(tmp_path: Path) -> None:
    """A worker of a pool whose master waits for something else keeps its number when it has ended."""
    parent = subprocess.Popen(["sleep", "60"])
    config = RuntimeConfig(run_dir=str(tmp_path / "run"), no_http=True, parent_pid=parent.pid)
    with started(config) as supervisor:
        supervisor._turn()
        assert not supervisor._stopping
        parent.kill()
        os.waitid(os.P_PID, parent.pid, os.WEXITED | os.WNOWAIT)
        supervisor._turn()
        assert supervisor._ends_at_once
    parent.wait()


@pytest.mark.parametrize("pid", [(1 << 22) + 1, 10**12])
def test_a_parent_that_is_not_there_is_a_mistake(pid: int) -> None:
    with pytest.raises(ConfigError, match=f"^parent_pid: there is no process {pid}; leave it out"):
        Supervisor(RuntimeConfig(no_http=True, parent_pid=pid))


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
        supervisor._set_state("ready")
        monkeypatch.setattr(supervisor, "_start_child", start)
        place = ProcessPlace("tokenizer", 0, "tokenizer")
        supervisor._due[place] = 0.0
        for _ in range(5):
            supervisor._start_due()
        assert tried == [place] * min(num_failures + 1, 4)
        assert not supervisor._due
        assert (supervisor._failure is not None) == (num_failures > 3)


def test_a_process_that_cannot_be_watched_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(_: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "pidfd_open", no_more)
    pids: list[int] = []
    wait = subprocess.Popen.wait

    def note(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        pids.append(process.pid)
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", note)
    with pytest.raises(StartError, match=r"^tokenizer cannot be watched: .*Too many open files"):
        LocalHost(tmp_path, zmq.Poller(), {}).start(ProcessPlace("tokenizer", 0, "tokenizer"), FIRST_EPOCH)
    assert len(pids) == 1
    assert not Path(f"/proc/{pids[0]}").exists()


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
    supervisor._set_state("ready")
    for _ in range(2):
        worker, scheduler = engine(supervisor, state)
        worker.process.wait()
        supervisor._on_exit(worker)
        assert scheduler.process.poll() == -signal.SIGKILL
    assert Suspects.read(endpoints.suspects_file).alone.keys() == ({KEY} if state == "ready" else set())
    before = time.monotonic_ns()
    supervisor._beat()
    assert supervisor.names.page.read("launcher").recovery_ns >= before


def test_who_came_past_a_death_in_an_engine_that_was_killed_is_not_suspected_again(
    supervisor: Supervisor,
) -> None:
    endpoints = supervisor.names.endpoints
    supervisor._set_state("ready")
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
    supervisor._set_state("ready")
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


@pytest.mark.parametrize("level", [logging.INFO, logging.ERROR])
def test_where_the_server_is_is_said_at_every_log_level(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, level: int
) -> None:
    caplog.set_level(level)
    with started(RuntimeConfig(run_dir=str(tmp_path / "run"), port=0)) as supervisor:
        supervisor._announce()
        said = capfd.readouterr().err + caplog.text
        assert said.count(f"http://127.0.0.1:{supervisor.names.port}") == 1
