"""The output of a batch: nothing that is whole is lost, and nothing that is torn stays."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from carousel.batch.lines import BatchRequest, answered
from carousel.batch.output_file import OutputFile
from carousel.http_client import HttpAnswer
from runtime.base.errors import ConfigError


def line(custom_id: str) -> bytes:
    request = BatchRequest(1, custom_id, "/v1/completions", b"{}")
    return answered(request, HttpAnswer(200, {}, b'{"text": "x"}')).data


def test_a_torn_last_line_is_cut_off_wherever_it_is_torn(tmp_path: Path) -> None:
    path, whole, torn = tmp_path / "out", line("a") + line("b"), line("c")
    for length in (0, 1, 20, len(torn) // 2, len(torn) - 2, len(torn) - 1, len(torn)):
        path.write_bytes(whole + torn[:length])
        output = OutputFile(path, resume=True)
        found = [each.custom_id for each in output.read()]
        output.write(line("d"))
        output.close()
        # JSON that lacks its line break alone is whole.
        is_whole = length >= len(torn) - 1
        assert found == (["a", "b", "c"] if is_whole else ["a", "b"])
        assert path.read_bytes()[: -len(line("d"))] == whole + (torn if is_whole else b"")


def test_what_is_no_output_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_bytes(notes := b"my notes\n" + line("a"))
    with pytest.raises(ConfigError, match="not empty"):
        OutputFile(path, resume=False)
    output = OutputFile(path, resume=True)
    with pytest.raises(ConfigError, match="line 1"):
        list(output.read())
    output.close()
    assert path.read_bytes() == notes


def test_one_run_at_a_time_writes_a_file(tmp_path: Path) -> None:
    first = OutputFile(tmp_path / "out", resume=False)
    with pytest.raises(ConfigError, match="another run"):
        OutputFile(tmp_path / "out", resume=True)
    first.close()
    OutputFile(tmp_path / "out", resume=False).close()


def test_a_full_disk_leaves_no_part_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, write = OutputFile(tmp_path / "out", resume=False), os.write
    output.write(line("a"))
    num_left = 10

    def until_full(fd: int, data: Any) -> int:
        nonlocal num_left
        if not num_left:
            raise OSError(28, "No space left on device")
        num_written = write(fd, data[:num_left])
        num_left -= num_written
        return num_written

    monkeypatch.setattr("carousel.batch.output_file.os.write", until_full)
    with pytest.raises(OSError, match="No space left"):
        output.write(line("b"))
    monkeypatch.undo()
    output.close()
    (kept,) = (tmp_path / "out").read_bytes().splitlines()
    assert b'"a"' in kept


@pytest.mark.parametrize(("name", "says"), [(".", "directory"), ("no/out", "No such file")])
def test_a_path_that_cannot_be_written_is_named(tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"-o: .*{says}"):
        OutputFile(tmp_path / name, resume=False)
