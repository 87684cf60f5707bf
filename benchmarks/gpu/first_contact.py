"""Measurements of a GPU that is available for minutes, the most valuable first.

    python -m benchmarks.gpu.first_contact --plan                        each window's steps, with estimates
    python -m benchmarks.gpu.first_contact --window a --out DIR          facts and tests
    python -m benchmarks.gpu.first_contact --window b --out DIR          speed
    python -m benchmarks.gpu.first_contact --window c --again RESULTS.tgz --out DIR      both again

Each step is a process with a time limit. One that fails, hangs or finds no memory does not stop the others;
one that no longer fits the remaining time (--minutes) is skipped. Two files in DIR are written after every
step: index.json, with the result of each step, and results.tgz, with everything that the steps have written.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.gpu.pack import pack
from benchmarks.gpu.steps import TINY, WINDOWS, Step

ROOT = Path(__file__).resolve().parents[2]
WORK = Path("gpu-results")
ALL_TESTS = ("tests/gpu",)
RESERVE_S = 5.0
"""Seconds reserved at the end for packing."""
GRACE_S = 5.0
"""Seconds between asking a process group to end and killing it."""
LEAST_S = 3.0
"""Estimate in seconds below which a step always fits."""


class Contact:
    """A run of steps against the clock. python: command that replaces {python}."""

    def __init__(
        self, work: Path, out: Path, end: float, *, python: Sequence[str], failed: Sequence[str] = ALL_TESTS
    ) -> None:
        """end: end of the time, on the monotonic clock."""
        self._work, self._out, self._end = work, out, end
        self._python, self._failed = python, failed
        self.index: list[dict[str, Any]] = []
        for folder in (work, out):
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def _left(self) -> float:
        return self._end - RESERVE_S - time.monotonic()

    def run(self, steps: Sequence[Step]) -> None:
        self.index = [{"step": step.name, "status": "waiting", "estimate": step.seconds} for step in steps]
        for step, entry in zip(steps, self.index, strict=True):
            began, num_kernels = time.monotonic(), _num_compiled()
            entry["status"] = "running"
            self._write()
            entry["status"] = self._outcome(step)
            entry["seconds"] = round(time.monotonic() - began, 1)
            entry["compiled"] = _num_compiled() - num_kernels
            print(f"{step.name:<24}{entry['status']:<40}{entry['seconds']:>7.1f} s", flush=True)
            self._write()

    def _outcome(self, step: Step) -> str:
        """Run a step and return its outcome in words."""
        if missing := list(_missing(step)):
            return f"missing: {', '.join(missing)}"
        if step.seconds > max(self._left, LEAST_S):
            return f"skipped: {max(0.0, self._left):.0f} s are left"
        with (self._work / f"{step.name}.log").open("wb") as log:
            try:
                process = subprocess.Popen(
                    list(self._command(step)),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    cwd=ROOT,
                    env=_environment(),
                )
            except OSError as error:
                return f"failed: {error}"
            return _ended(process, min(step.limit, max(LEAST_S, self._left)))

    def _command(self, step: Step) -> Iterator[str]:
        for part in step.command:
            if part == "{python}":
                yield from self._python
            elif part == "{failed}":
                yield from self._failed
            else:
                yield part.replace("{out}", str(self._work.resolve()))

    def _write(self) -> None:
        (self._out / "index.json").write_text(json.dumps(self.index, indent=1))
        (self._work / "index.json").write_text(json.dumps(self.index, indent=1))
        left_out = pack(self._work, self._out / "results.tgz")
        if left_out:
            print(f"too large for results.tgz: {', '.join(left_out)}", flush=True)


def _ended(process: subprocess.Popen[bytes], limit_s: float) -> str:
    """Wait for a process that has its own process group, and kill the rest of the group."""
    try:
        code = process.wait(limit_s)
        status = "ok" if code == 0 else f"failed: exit code {code}"
    except subprocess.TimeoutExpired:
        status = f"timed out after {limit_s:.0f} s"
        _signal(process, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    _signal(process, signal.SIGKILL)
    process.wait()
    return status


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # the group has ended
        os.killpg(process.pid, number)


def _missing(step: Step) -> Iterator[str]:
    yield from (name for name in step.programs if shutil.which(name) is None)
    yield from (name for name in step.modules if importlib.util.find_spec(name) is None)


def _environment() -> dict[str, str]:
    """Return the environment: with Triton's options of a server, and unbuffered output for logs."""
    return {"TRITON_DEFAULT_FP_FUSION": "1", "PYTHONUNBUFFERED": "1", **os.environ}


def _num_compiled() -> int:
    """Return the number of kernels in Triton's cache."""
    folder = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
    return sum(1 for _ in Path(folder).glob("*/*.cubin"))


def failed_tests(results: Path) -> list[str]:
    """Return the tests that failed in the reports of a results.tgz, as pytest names them. Raises OSError or
    tarfile.TarError if it cannot be read.
    """
    found: dict[str, None] = {}
    with tarfile.open(results) as archive:
        for member in archive.getmembers():
            file = archive.extractfile(member) if member.name.endswith(".xml") else None
            try:
                cases = [] if file is None else list(ElementTree.parse(file).iter("testcase"))
            except ElementTree.ParseError:  # of a run that was killed
                continue
            for case in cases:
                if case.find("failure") is not None or case.find("error") is not None:
                    found[f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"] = None
    return list(found)


def print_plan() -> None:
    for name, (minutes, steps) in WINDOWS.items():
        print(f"window {name}: {minutes} minutes, {sum(step.seconds for step in steps)} s by estimate")
        for step in steps:
            needs = ", ".join((*step.programs, *step.modules))
            print(f"  {step.name:<24}{step.seconds:>5} s, at most {step.limit} s" + f"   {needs}".rstrip())


def main(argv: list[str] | None = None, python: Sequence[str] = (sys.executable,)) -> int:
    """Run a window. Returns 1 if a step was not "ok"."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--plan", action="store_true", help="print the steps and end")
    parser.add_argument("--minutes", type=float, help="how long it may take; default: the window's")
    parser.add_argument("--window", choices=WINDOWS, default="a")
    parser.add_argument("--out", type=Path, default=Path(), help="for index.json and results.tgz")
    parser.add_argument("--work", type=Path, default=WORK, help="for the steps' files; default: gpu-results")
    parser.add_argument("--again", type=Path, metavar="RESULTS.tgz", help="whose failed tests are run again")
    parser.add_argument("--tiny", action="store_true", help="a few small steps, for a try without a GPU")
    arguments = parser.parse_args(argv)
    if arguments.plan:
        print_plan()
        return 0
    minutes, steps = WINDOWS[arguments.window]
    if arguments.minutes is not None and arguments.minutes <= 0:
        parser.error("--minutes: must be more than 0")
    failed: Sequence[str] = ALL_TESTS
    if arguments.again is not None:
        try:
            failed = failed_tests(arguments.again) or ALL_TESTS
        except (OSError, tarfile.TarError) as error:
            parser.error(f"--again: {error}")
    end = time.monotonic() + 60.0 * (arguments.minutes or minutes)
    contact = Contact(arguments.work, arguments.out, end, python=python, failed=failed)
    contact.run(TINY if arguments.tiny else steps)
    return 0 if all(entry["status"] == "ok" for entry in contact.index) else 1


if __name__ == "__main__":
    sys.exit(main())
