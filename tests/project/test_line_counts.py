"""benchmarks/code/line_counts.py counts code, and a moved file where it is now."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.code.line_counts import num_code_lines, report

SOURCE = '''"""A module.

Two paragraphs.
"""

import os  # a comment behind code

# A comment.


class A:
    """A class."""

    field: int = 1
    """A field."""

    def method(self) -> str:
        """Return text."""
        return """two
lines"""


print(
    os.name,

    A,
)
'''


def test_blank_lines_comments_and_docstrings_are_not_counted() -> None:
    assert num_code_lines(SOURCE) == 1 + 1 + 1 + 1 + 2 + 4


def test_a_moved_file_counts_where_it_is_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*args: str) -> None:
        identity = ("-c", "user.name=n", "-c", "user.email=e@example.org")
        subprocess.run(["git", *identity, *args], cwd=tmp_path, check=True, capture_output=True)

    def commit(tag: str) -> None:
        git("add", "-A")
        git("commit", "-m", tag)
        git("tag", tag)

    (tmp_path / "old").mkdir()
    (tmp_path / "tests").mkdir()
    for name in ("kept", "moved", "peer"):
        body = "".join(f"{name}_{i} = {i}\n" for i in range(9))
        (tmp_path / f"old/{name}.py").write_text(body)
    (tmp_path / "tests/test_kept.py").write_text("a = 1\n")
    git("init")
    commit("base")
    (tmp_path / "new").mkdir()
    (tmp_path / "carousel/trtllm").mkdir(parents=True)
    (tmp_path / "old/moved.py").rename(tmp_path / "new/moved.py")
    (tmp_path / "old/peer.py").rename(tmp_path / "carousel/trtllm/peer.py")
    (tmp_path / "new/moved.py").write_text((tmp_path / "new/moved.py").read_text() + "more = 1\n")
    commit("head")
    monkeypatch.chdir(tmp_path)
    assert report("base", "head") == {"new": (1, 1, 9, 10), "old": (1, 1, 9, 9), "all": (2, 2, 18, 19)}
