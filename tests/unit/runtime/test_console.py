"""runtime.base.console: whatever becomes of standard error, nothing blocks and nothing raises."""

from __future__ import annotations

import logging
import os
import select
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


def test_each_line_has_the_time_of_its_record() -> None:
    ours = console.TextFormatter("api")
    plain = logging.Formatter("[%(asctime)s api] %(message)s", "%Y-%m-%d %H:%M:%S")
    for created in (1.0, 1.9, 2.0, 61.5, 61.6, 1.9, 86400.0):
        said = logging.makeLogRecord({"created": created, "msg": "said"})
        assert ours.format(said) == plain.format(said)
