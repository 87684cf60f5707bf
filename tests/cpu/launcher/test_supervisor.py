"""In which order a launch says how it is, and what signals, hangs and ends do to it."""

from __future__ import annotations

import errno
import json
import logging
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from runtime.base.errors import ConfigError, StartError
from runtime.launcher import launch_records
from runtime.launcher.hosts.host import Child, ProcessPlace
from runtime.launcher.hosts.local import LocalChild, LocalHost
from runtime.launcher.launch_names import LaunchNames
from runtime.launcher.supervisor import Supervisor
from runtime.ring.process import FIRST_EPOCH
from runtime.settings.config import RuntimeConfig
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
    supervisor._status.enter(state)
    assert in_slot == [state if slot_is_first else "absent"]
    assert supervisor.names.page.read("launcher").state == state


def test_a_disk_that_hangs_keeps_nobody_from_being_replaced(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(launch_records, "write_atomically", lambda *_: answers.wait(20.0))
    monkeypatch.setattr(launch_records, "MAX_WAIT_S", 0.01)
    supervisor._status.enter("ready")
    process = subprocess.Popen(["sh", "-c", "kill -KILL $$"])
    child = LocalChild(
        ProcessPlace("tokenizer", 0, "tokenizer"), FIRST_EPOCH, process, os.pidfd_open(process.pid)
    )
    adopt(supervisor, child)
    started: list[ProcessPlace] = []
    monkeypatch.setattr(supervisor._restarts, "start", started.append)
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
    supervisor._status.enter(state)
    process = subprocess.Popen(["sleep", "60"])
    child = LocalChild(
        ProcessPlace("api", 0, "api"), FIRST_EPOCH, process, os.pidfd_open(process.pid), is_ready=True
    )
    adopt(supervisor, child)
    supervisor.names.page.write("api", ProcessStatus(FIRST_EPOCH, child.pid, "ready"))
    for _ in range(2):
        supervisor._signals._stop()
    process.wait()
    supervisor._turn()
    assert supervisor._children.get(child.place) is None
    assert supervisor._status.failure is None
    assert not supervisor._children.due
    assert supervisor.names.page.read("api").state == "ready"  # as it has left it, not "restarting"
    assert "restarting" not in caplog.text


def test_a_signal_is_heard_at_once(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not when the wait for something else is over."""
    monkeypatch.setattr("runtime.launcher.supervisor.POLL_S", 60.0)
    began = time.monotonic()
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
    supervisor._turn()
    assert supervisor._status.is_stopping
    assert time.monotonic() - began < 30.0


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
        assert not supervisor._status.is_stopping
        parent.kill()
        os.waitid(os.P_PID, parent.pid, os.WEXITED | os.WNOWAIT)
        supervisor._turn()
        assert supervisor._status.ends_at_once
    parent.wait()


@pytest.mark.parametrize("pid", [(1 << 22) + 1, 10**12])
def test_a_parent_that_is_not_there_is_a_mistake(pid: int) -> None:
    with pytest.raises(ConfigError, match=f"^parent_pid: there is no process {pid}; leave it out"):
        Supervisor(RuntimeConfig(no_http=True, parent_pid=pid))


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


@pytest.mark.parametrize("level", [logging.INFO, logging.ERROR])
def test_where_the_server_is_is_said_at_every_log_level(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, level: int
) -> None:
    caplog.set_level(level)
    with started(RuntimeConfig(run_dir=str(tmp_path / "run"), port=0)) as supervisor:
        supervisor._announce()
        said = capfd.readouterr().err + caplog.text
        assert said.count(f"http://127.0.0.1:{supervisor.names.port}") == 1
