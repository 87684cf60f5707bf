"""Fenced blocks of the documentation: their languages, and the test that runs each.

A block is run by tests/cpu/launch/test_docs_run.py, unless a comment on the line before it says otherwise:
`<!-- run by PATH -->` names the test that runs it, `<!-- not run: REASON -->` gives the reason why none does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.harness.sources import ROOT

LANGUAGES = {"bash", "json", "nginx", "python", "text", "toml"}
RUN = {"bash", "python"}
"""Languages of blocks that are run."""
_FENCE = re.compile(r"^ *```(?P<language>.*)$")
_MARK = re.compile(r"^<!-- (?:run by (?P<runner>\S+)|not run: (?P<reason>.+)) -->$")


@dataclass(frozen=True, slots=True)
class Block:
    page: str
    """Path of the page within the project."""
    line: int
    """Number of its first line, the fence."""
    language: str
    text: str
    runner: str = ""
    """Path of another test that runs it."""
    reason: str = ""
    """Why it is not run."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_run(self) -> bool:
        """Return True for a block that test_docs_run.py runs."""
        return self.language in RUN and not self.runner and not self.reason


def pages() -> list[Path]:
    """Pages for readers, wherever they are in the tree."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "tests").rglob("*.md")]
    return sorted(path for path in found if path.is_file())


def blocks() -> list[Block]:
    """Return the blocks of all pages."""
    return [block for page in pages() for block in blocks_of(page.read_text(), str(page.relative_to(ROOT)))]


def blocks_of(text: str, page: str) -> Iterator[Block]:
    """Yield the blocks of a page. Raises AssertionError for one that does not end."""
    lines = text.splitlines()
    start, language = -1, ""
    for index, line in enumerate(lines):
        fence = _FENCE.match(line)
        if fence is None:
            continue
        if start < 0:
            start, language = index, fence["language"]
            continue
        assert not fence["language"], f"{page}:{index + 1} begins a block within a block"
        mark = _MARK.match(lines[start - 1]) if start else None
        runner, reason = (mark["runner"] or "", mark["reason"] or "") if mark else ("", "")
        body = "".join(f"{each}\n" for each in lines[start + 1 : index])
        yield Block(page, start + 1, language, body, runner, reason)
        start = -1
    assert start < 0, f"{page}:{start + 1} does not end"
