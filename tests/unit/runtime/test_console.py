"""runtime.base.console: whatever becomes of standard error, nothing blocks and nothing raises."""

from __future__ import annotations

import json
import logging
import os
import re
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.base import console

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """(end to read, end to write) of a pipe that stands for standard error."""
    reader, writer = os.pipe()
    monkeypatch.setattr(console, "STDERR_FD", writer)
    yield reader, writer
    for fd in (reader, writer):
        os.close(fd)


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("name", logging.INFO, "file", 1, text, None, None)


def test_records_come_out_as_lines_however_long(pipe: tuple[int, int]) -> None:
    long = "é" * (3 * select.PIPE_BUF)
    handler = console.ConsoleHandler()
    for text in ("one", long, "\ud800"):
        handler.emit(record(text))
    assert os.read(pipe[0], 1 << 20) == f"one\n{long}\n\\ud800\n".encode()


def test_an_error_is_one_line_whatever_a_library_says(pipe: tuple[int, int]) -> None:
    console.write_error("it has no such model\n\n    You can  update it.\n")
    assert os.read(pipe[0], 1 << 20) == b"error: it has no such model You can  update it.\n"


def test_a_pipe_that_nobody_reads_costs_lines_and_not_the_process(pipe: tuple[int, int]) -> None:
    handler = console.ConsoleHandler()
    for number in range(10_000):
        handler.emit(record(f"line {number} " + "x" * 100))
    lines = os.read(pipe[0], 1 << 20).decode().splitlines()
    assert len(lines) > 300
    assert [line.split()[1] for line in lines] == [str(number) for number in range(len(lines))]
    handler.emit(record("again"))
    assert os.read(pipe[0], 1 << 20) == b"again\n"


def test_a_reader_that_is_gone_and_a_record_that_cannot_be_formatted_raise_nothing(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)
    bad = record("%d")
    bad.args = ("no number",)
    handler = console.ConsoleHandler()
    handler.emit(bad)
    os.dup2(os.open(os.devnull, os.O_RDONLY), pipe[0])
    handler.emit(record("nobody reads this"))


def test_closed_standard_streams_are_not_given_to_the_next_file() -> None:
    code = (
        "import os; from runtime.base.console import hold_standard_streams; hold_standard_streams()\n"
        "fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(2)]\n"
        "links = {os.readlink(f'/proc/self/fd/{fd}') for fd in range(3)}\n"
        "os._exit(0 if min(fds) > 2 and links == {os.devnull} else 1)"
    )
    command = f'exec {sys.executable} -c "$CODE" <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", command], env={**os.environ, "CODE": code}, cwd=ROOT).returncode == 0


JSON_SCRIPT = """
import logging, sys, threading, warnings
from runtime.base.console import configure_logging, log_context, write_error, write_line
configure_logging("scheduler:1", "info", "json")
log_context.set({"request_id": "mine"})
logging.getLogger("a").info("%s and\\nmore \\u2028 caf\\xe9 \\udc80", "one")
log_context.set({})
try:
    raise ValueError("wrong")
except ValueError:
    logging.getLogger("a").exception("failed")
write_line("ready: m")
write_error("line one\\n  line two")
warnings.warn("old")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
raise RuntimeError("the end")
"""


def test_every_line_in_json_is_an_object() -> None:
    process = subprocess.run(
        [sys.executable, "-c", JSON_SCRIPT], capture_output=True, text=True, cwd=ROOT, check=False
    )
    lines = [json.loads(line) for line in process.stderr.splitlines()]
    assert [line["message"].split("\n")[0][:16] for line in lines] == [
        *("one and", "failed", "ready: m", "line one line tw"),
        lines[4]["message"].split("\n")[0][:16],
        *("a thread has end", "ended"),
    ]
    assert {line["process"] for line in lines} == {"scheduler:1"}
    assert [line["level"] for line in lines] == [
        *("info", "error", "info", "error", "warning", "error", "critical")
    ]
    assert [line.get("request_id") for line in lines] == ["mine", *[None] * 6]
    assert "ValueError: wrong" in lines[1]["exception"]
    assert "old" in lines[4]["message"]
    assert "ZeroDivisionError" in lines[5]["exception"]
    assert "RuntimeError: the end" in lines[6]["exception"]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"]) for line in lines)
