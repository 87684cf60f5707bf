"""Faults of the ring's processes, their own and those that somebody sends: by which signal they end."""

from __future__ import annotations

import os
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("module")
    (folder / "faulty.py").write_text(MODULE)
    return folder


def start(folder: Path, how: str) -> subprocess.Popen[str]:
    root = Path(__file__).resolve().parents[3]
    return subprocess.Popen(
        [sys.executable, "-m", "runtime.launcher.child", str(os.getpid()), "0", "faulty", how],
        env={**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{folder}"},
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
