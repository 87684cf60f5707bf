"""Launches that are forked: they find what a new process finds, and end as one does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runtime.base.environment import child_environment
from tests.harness.ring.launched import SLACK, launched
from tests.harness.warm_start import ROOT, WarmProcess, stock

FACTS = "tests.harness.process_facts"


def forked(file: Path, *arguments: str) -> WarmProcess:
    """Start a process that writes to `file`."""
    with file.open("w+b") as output:
        fd = output.fileno()
        return stock().start(FACTS, arguments, os.environ, stdout=fd, stderr=fd)


def new(file: Path, *arguments: str) -> subprocess.Popen[bytes]:
    with file.open("w+b") as output:
        return subprocess.Popen(
            [sys.executable, "-m", FACTS, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=ROOT,
            env=os.environ,  # libraries have set more for those that this process starts
        )


def facts(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_a_fork_finds_what_a_new_process_does(tmp_path: Path) -> None:
    file = tmp_path / "facts"
    assert new(file, "0", "--flag", "a b").wait(20 * SLACK) == 0
    expected = facts(file)
    assert expected["arguments"] == ["0", "--flag", "a b"]
    assert forked(file, "0", "--flag", "a b").wait(20 * SLACK) == 0
    assert facts(file) == expected


@pytest.mark.parametrize("end", [0, 70, -signal.SIGKILL, -signal.SIGTERM])
def test_the_end_of_a_fork_is_told_as_that_of_any_process(end: int, tmp_path: Path) -> None:
    process = forked(tmp_path / "facts", str(int(end)))
    assert process.wait(20 * SLACK) == process.poll() == process.returncode == end


def test_a_fork_is_waited_for_as_long_as_one_likes_and_hears_signals(tmp_path: Path) -> None:
    process = forked(tmp_path / "facts", "never")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    assert process.poll() is None
    process.terminate()
    assert process.wait(20 * SLACK) == -signal.SIGTERM
    process.kill()  # whoever has its number now


def test_what_libraries_read_as_they_are_loaded_needs_a_new_process() -> None:
    own = child_environment()
    assert stock().may_start({**own, "CAROUSEL_API_KEY": "secret", "PYTEST_CURRENT_TEST": "another"})
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TIKTOKEN_CACHE_DIR", "TRITON_DEFAULT_FP_FUSION"):
        assert stock().may_start({**own, name: "/other"}), name
    for name in ("OMP_NUM_THREADS", "CAROUSEL_CPU_ISA", "HOME", "PYTHONPATH"):
        assert stock().differences({**own, name: "/other"}) == {name}
        assert not stock().may_start({**own, name: "/other"}), name


def test_all_processes_of_a_launch_are_forks_but_for_cold_ones(pytestconfig: pytest.Config) -> None:
    """Those that need no torch have it, then: it was there before them."""
    with launched("--skip-tokenizer-init", module="tests.harness.ring.sleeping_worker") as launch:
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid in launch.pids()]
    is_warm = not pytestconfig.getoption("--cold")
    assert len(maps) > 5
    assert {"libtorch_cpu" in each for each in maps} == {is_warm}
