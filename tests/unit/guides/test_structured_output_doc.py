"""docs/structured_output.md: its table of keywords is the table."""

from __future__ import annotations

import re

from runtime.guides.keywords import FOREIGN, KEYWORDS, XGRAMMAR
from tests.harness.sources import ROOT

WORDS = {"kept": "kept", "annotation": "no effect on output", "refused": "refused"}


def rows() -> list[str]:
    """The table as the page has it."""
    return [
        f"| `{name}` | {WORDS[row.treatment]} | {row.note} | {XGRAMMAR.get(name, '')} |".replace("  |", " |")
        for name, row in (KEYWORDS | FOREIGN).items()
    ]


def test_the_page_shows_the_table() -> None:
    page = (ROOT / "docs" / "structured_output.md").read_text()
    shown = re.findall(r"^\| `.*\| (?:kept|no effect on output|refused) \|.*$", page, re.MULTILINE)
    assert shown == rows(), "\n" + "\n".join(rows())
