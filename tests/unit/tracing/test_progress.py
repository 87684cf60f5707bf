"""Progress: a bar on a terminal, else a line every few seconds, and no byte of a bar in a log."""

from __future__ import annotations

import itertools
import json
import os
import pty
import time

import pytest

from runtime.base import console, progress
from runtime.base.progress import Progress


def test_without_a_terminal_there_is_a_line_every_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: float(next(ticks)))
    said: list[str] = []
    shown = Progress("reading", "files", say=said.append, has_bar=False)
    for done in range(1, 13):
        shown.note(done, 12)
    assert said == ["reading: 5 of 12 files (41 %)", "reading: 10 of 12 files (83 %)"]


@pytest.mark.parametrize("is_json", [False, True])
def test_a_terminal_has_a_bar_unless_the_log_is_in_json(
    monkeypatch: pytest.MonkeyPatch, *, is_json: bool
) -> None:
    reader, writer = pty.openpty()
    monkeypatch.setattr(console, "STDERR_FD", writer)
    monkeypatch.setattr(console, "_json_process", "api" if is_json else "")
    monkeypatch.setattr(progress, "DRAW_S", 0.0)
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    shown = Progress("reading", "files")
    for done in range(3):
        shown.note(done, 2, ", 7 tok/s")
    console.write_line("a line")
    written = ""
    while "a line" not in written:
        written += os.read(reader, 4096).decode()
    written += "" if written.endswith("\n") else os.read(reader, 4096).decode()
    os.close(reader)
    os.close(writer)
    if is_json:
        lines = [json.loads(line)["message"] for line in written.splitlines()]
        assert lines[-2:] == ["reading: 2 of 2 files (100 %), 7 tok/s", "a line"]
        return
    clear, bar = "\r\x1b[K", "#" * 15 + " " * 15
    assert f"{clear}reading [{bar}] 1 of 2 files (50 %), 7 tok/s\r" in written
    assert written.endswith(f"{clear}\ra line\r\n"), "nothing is left of it"
