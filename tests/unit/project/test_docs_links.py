"""Links of README.md and docs/ lead to files and headings that are there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.sources import ROOT

FENCE = re.compile(r"^ *```.*?^ *```", re.M | re.S)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.*?) *$", re.M)
CODE = re.compile(r"`[^`\n]*`")


def pages() -> list[Path]:
    """Pages for readers, wherever they are in the tree."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "tests").rglob("*.md")]
    return sorted(path for path in found if path.is_file())


def anchors(text: str) -> set[str]:
    """Anchors that GitHub makes of the headings of a page."""
    found: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", text)):
        words = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        number = sum(1 for each in found if re.fullmatch(rf"{re.escape(words)}(-\d+)?", each))
        found.add(f"{words}-{number}" if number else words)
    return found


def dead_links(page: Path, text: str) -> Iterator[str]:
    """Links of a page within the project that lead nowhere."""
    for target in LINK.findall(CODE.sub("", FENCE.sub("", text))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.is_relative_to(ROOT) or not path.exists():
            yield f"{page.relative_to(ROOT)}: {target}"
        elif (
            anchor
            and path.suffix == ".md"
            and anchor not in anchors(text if path == page else path.read_text())
        ):
            yield f"{page.relative_to(ROOT)}: {target} has no such heading"


def test_no_link_is_dead() -> None:
    found = pages()
    assert len(found) > 30
    assert not [words for page in found for words in dead_links(page, page.read_text())]


@pytest.mark.parametrize(
    "target", ["no_such_page.md", "README.md#no-such-heading", "#nor-this", "../outside.md"]
)
def test_a_dead_link_is_found(target: str) -> None:
    text = f"# A page\n\nSee [this]({target}), and [that](#a-page), `[code](no.md)`.\n"
    assert len(list(dead_links(ROOT / "README.md", text))) == 1
