"""Faults of the ring's processes, their own and those that somebody sends: by which signal they end."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

MODULE = """
import ctypes, os, signal, sys, threading, time
def fault():
    ctypes.string_at(0)
how = sys.argv[1]
if how == "fault":
    fault()
if how == "thread":
    threading.Thread(target=fault).start()
if how == "raise":
    os.kill(os.getpid(), signal.SIGSEGV)
print("waits", flush=True)
time.sleep(60)
"""

LEADER = """
import fcntl, subprocess, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
settings = termios.tcgetattr(0)
settings[3] |= termios.TOSTOP
termios.tcsetattr(0, termios.TCSANOW, settings)
sys.exit(subprocess.Popen(sys.argv[1:], process_group=0).wait())
"""
"""Has a terminal that stops whoever writes from the background, and starts something there."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("module")
    (folder / "faulty.py").write_text(MODULE)
    return folder


def environment(folder: Path) -> dict[str, str]:
    root = Path(__file__).resolve().parents[3]
    return {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{folder}"}


def start(folder: Path, how: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "runtime.launcher.child", str(os.getpid()), "0", "faulty", how],
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("how", ["fault", "thread", "raise"])
def test_a_fault_of_its_own_ends_a_process_by_that_signal(folder: Path, how: str) -> None:
    with start(folder, how) as process:
        assert process.wait(30) == -signal.SIGSEGV


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGBUS])
def test_a_fault_that_somebody_sends_ends_it_as_a_kill_does_and_the_log_names_the_sender(
    folder: Path, number: signal.Signals
) -> None:
    with start(folder, "not at all") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "waits\n"
        process.send_signal(number)
        assert process.wait(30) == -signal.SIGKILL
        assert process.stderr.read() == f"process {os.getpid()} has sent {number.name}\n"


def test_a_terminal_that_stops_who_writes_from_the_background_stops_no_process_of_a_launch(
    folder: Path,
) -> None:
    ours, terminal = os.openpty()
    # The leader's number is what its child takes for its launcher's.
    child = [sys.executable, "-c", "import os, sys; os.execv(sys.executable, [sys.executable, '-m', "]
    child[-1] += "'runtime.launcher.child', str(os.getppid()), '0', 'faulty', 'not at all'])"
    leader = subprocess.Popen(
        [sys.executable, "-c", LEADER, *child],
        env=environment(folder),
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    is_written = bool(select.select([ours], [], [], 30)[0])
    written = os.read(ours, 5) if is_written else b""
    os.close(ours)
    leader.kill()
    leader.wait()
    assert written == b"waits"
