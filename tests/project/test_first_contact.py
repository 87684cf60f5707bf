"""Steps against the clock: what fits is run, what fails keeps nothing else from running, all is packed."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tarfile
import time
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.gpu import first_contact
from benchmarks.gpu.first_contact import RESERVE_S, Contact, failed_tests
from benchmarks.gpu.pack import MAX_LOG_BYTES, pack
from benchmarks.gpu.steps import WINDOWS, Step
from tests.harness.sources import ROOT

MOST_S = 600
"""Limit of one command, in seconds."""


def python(name: str, code: str, seconds: int = 1, limit: int = 30) -> Step:
    return Step(name, seconds, limit, ("{python}", "-S", "-c", code, "{out}"))


def run(tmp_path: Path, steps: list[Step], seconds: float = 60.0) -> dict[str, str]:
    """Outcomes of all steps."""
    end = time.monotonic() + seconds + RESERVE_S
    contact = Contact(tmp_path / "work", tmp_path / "out", end, python=(sys.executable,))
    contact.run(steps)
    assert json.loads((tmp_path / "out" / "index.json").read_text()) == contact.index
    return {entry["step"]: entry["status"] for entry in contact.index}


def is_running(pid: int) -> bool:
    """Neither gone nor waiting for init to look at its exit code."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def packed(tmp_path: Path) -> dict[str, bytes]:
    with tarfile.open(tmp_path / "out" / "results.tgz") as archive:
        files = {member.name: archive.extractfile(member) for member in archive.getmembers()}
        return {name: file.read() for name, file in files.items() if file is not None}


def test_what_fails_hangs_or_is_missing_keeps_nothing_else_from_running(tmp_path: Path) -> None:
    waits = 'echo so far; sleep 60 & echo $! >"$0/pid"; wait'
    steps = [
        python("fails", "print('out of memory'); raise SystemExit(3)"),
        Step("hangs", 1, 1, ("sh", "-c", waits, "{out}")),
        Step("profile", 1, 30, ("no-such-profiler",), programs=("no-such-profiler",)),
        Step("parallel", 1, 30, ("{python}",), modules=("no_such_module",)),
        Step("nothing", 1, 30, ("/no/such/program",)),
        python("writes", "import sys, pathlib; pathlib.Path(sys.argv[1], 'rates.json').write_text('{}')"),
    ]
    outcomes = run(tmp_path, steps)
    assert outcomes.pop("nothing").startswith("failed: ")
    assert outcomes == {
        "fails": "failed: exit code 3",
        "hangs": "timed out after 1 s",
        "profile": "missing: no-such-profiler",
        "parallel": "missing: no_such_module",
        "writes": "ok",
    }
    files = packed(tmp_path)
    assert files["fails.log"] == b"out of memory\n"
    assert files["hangs.log"] == b"so far\n"
    assert files["rates.json"] == b"{}"
    assert not is_running(int(files["pid"]))


def test_a_step_that_no_longer_fits_is_skipped_and_a_shorter_one_is_run(tmp_path: Path) -> None:
    outcomes = run(tmp_path, [python("long", "", seconds=100), python("short", "")], seconds=50.0)
    assert outcomes["long"].startswith("skipped: ")
    assert outcomes["short"] == "ok"
    estimates = {entry["step"]: entry["estimate"] for entry in json.loads(packed(tmp_path)["index.json"])}
    assert estimates == {"long": 100, "short": 1}


def test_results_are_there_before_the_next_step_begins(tmp_path: Path) -> None:
    looks = """
import json, pathlib, sys, tarfile
out = pathlib.Path(sys.argv[1]).parent / "out"
assert [each["status"] for each in json.loads((out / "index.json").read_text())] == ["ok", "running"]
assert "first.log" in tarfile.open(out / "results.tgz").getnames()
"""
    assert run(tmp_path, [python("first", "print(1)"), python("looks", looks)])["looks"] == "ok"


def test_a_pack_is_no_larger_than_it_may_be(tmp_path: Path) -> None:
    folder, target = tmp_path / "work", tmp_path / "results.tgz"
    (folder / "traces").mkdir(parents=True)
    (folder / "traces" / "large.gz").write_bytes(os.urandom(90_000))
    (folder / "rates.json").write_text("{}")
    (folder / "test.log").write_bytes(b"x" * MAX_LOG_BYTES + b"the end")
    assert pack(folder, target, max_bytes=50_000) == ["traces/large.gz"]
    assert target.stat().st_size <= 50_000
    with tarfile.open(target) as archive:
        assert archive.getnames() == ["rates.json", "test.log"]
        log = archive.extractfile("test.log")
        assert log is not None
        assert log.read() == b"x" * (MAX_LOG_BYTES - 7) + b"the end"


@pytest.mark.parametrize("window", WINDOWS)
def test_each_window_fits_with_time_to_pack(window: str) -> None:
    minutes, steps = WINDOWS[window]
    assert minutes == {"a": 7, "b": 9, "c": 8}[window]
    assert sum(step.seconds for step in steps) + RESERVE_S <= 60 * minutes <= MOST_S
    assert all(step.seconds <= step.limit for step in steps)
    assert len({step.name for step in steps}) == len(steps)


@pytest.mark.parametrize("window", WINDOWS)
def test_steps_run_what_is_there(window: str) -> None:
    """Modules of the project, and files of tests."""
    for step in WINDOWS[window][1]:
        parts = [*step.command, ""]
        modules = [after for part, after in pairwise(parts) if part == "-m"]
        assert modules, step.name
        for module in modules:
            assert importlib.util.find_spec(module) is not None, module
        assert all((ROOT / part).exists() for part in parts if part.startswith("tests/"))


def test_the_plan_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert first_contact.main(["--plan"]) == 0
    plan = capsys.readouterr().out
    for minutes, steps in WINDOWS.values():
        assert f"{minutes} minutes" in plan
        assert all(f"  {step.name} " in plan and f" {step.seconds} s" in plan for step in steps)


def test_tests_that_failed_are_found_in_the_results(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "test-kernels.xml").write_text(
        """<testsuites><testsuite>
        <testcase classname="tests.gpu.test_cuda_kernels" name="test_attention[1]"/>
        <testcase classname="tests.gpu.test_cuda_kernels" name="test_attention[16]"><failure/></testcase>
        <testcase classname="tests.gpu.test_cuda_path" name="test_drawn"><error/></testcase>
        </testsuite></testsuites>"""
    )
    (tmp_path / "work" / "test-path.xml").write_text("<testsuites><tests")  # of a run that was killed
    pack(tmp_path / "work", tmp_path / "results.tgz")
    assert failed_tests(tmp_path / "results.tgz") == [
        "tests/gpu/test_cuda_kernels.py::test_attention[16]",
        "tests/gpu/test_cuda_path.py::test_drawn",
    ]
