"""Links of pages lead to files, headings and names in the code that are there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.doc_blocks import pages
from tests.harness.sources import ROOT

FENCE = re.compile(r"^ *```.*?^ *```", re.M | re.S)
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.*?) *$", re.M)
CODE = re.compile(r"`[^`\n]*`")
NAME = re.compile(r"`(?![\w.]*\.py`)([\w.]+)`")


def anchors(text: str) -> set[str]:
    """Anchors that GitHub makes of the headings of a page."""
    found: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", text)):
        words = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        number = sum(1 for each in found if re.fullmatch(rf"{re.escape(words)}(-\d+)?", each))
        found.add(f"{words}-{number}" if number else words)
    return found


def defines(path: Path, name: str) -> bool:
    """Return True if a module has a class or function `name`, or `Class.method`."""
    body: list[ast.stmt] = ast.parse(path.read_text()).body
    for part in name.split("."):
        kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        found = [node for node in body if isinstance(node, kinds) and node.name == part]
        if not found:
            return False
        body = found[-1].body
    return True


def dead_links(page: Path, text: str) -> Iterator[str]:
    """Links of a page within the project that lead nowhere."""
    prose = CODE.sub(lambda code: "" if "](" in code[0] else code[0], FENCE.sub("", text))
    for words, target in LINK.findall(prose):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        here = f"{page.relative_to(ROOT)}: {target}"
        if not path.is_relative_to(ROOT) or not path.exists():
            yield here
        elif path.suffix == ".py" and (code := NAME.fullmatch(words)) and not defines(path, code[1]):
            yield f"{here} has no {code[1]}"
        elif anchor and path.suffix == ".md" and anchor not in anchors(path.read_text()):
            yield f"{here} has no such heading"


def test_no_link_is_dead() -> None:
    found = pages()
    assert len(found) > 30
    assert not [words for page in found for words in dead_links(page, page.read_text())]


def test_every_page_of_measurements_and_decisions_is_in_its_index() -> None:
    for folder in ("measurements", "decisions"):
        index = ROOT / "docs" / folder / "README.md"
        linked = {target for _, target in LINK.findall(index.read_text())}
        assert sorted({page.name for page in index.parent.glob("*.md")} - linked) == ["README.md"]


@pytest.mark.parametrize(
    "target", ["no_such_page.md", "README.md#no-such-heading", "#nor-this", "../outside.md"]
)
def test_a_dead_link_is_found(target: str) -> None:
    text = f"See [this]({target}), and [that](#from-python), `[code](no.md)`.\n"
    assert len(list(dead_links(ROOT / "README.md", text))) == 1


def test_a_name_that_is_not_in_the_code_is_found() -> None:
    links = "[`main`](launch.py) [`Nobody`](carousel/__init__.py) [`LLM.nothing`](carousel/client/offline.py)"
    text = f"[`LLM.close`](carousel/client/offline.py) {links}"
    found = list(dead_links(ROOT / "README.md", text))
    assert [words.rsplit(" ", 1)[1] for words in found] == ["main", "Nobody", "LLM.nothing"]


def torn_tables(text: str) -> Iterator[str]:
    """First lines of tables that have no line of dashes below them: a blank line cuts a table in two."""
    for table in re.findall(r"(?:^\|.*\n?)+", FENCE.sub("", text), re.M):
        lines = table.splitlines()
        if len(lines) < 2 or set(lines[1]) - set("|:- "):
            yield lines[0]


def test_tables_are_whole() -> None:
    assert not [line for page in pages() for line in torn_tables(page.read_text())]


def test_a_torn_table_is_found() -> None:
    table = "| a | b |\n|---|:-:|\n| c | d |\n"
    assert list(torn_tables(f"x\n\n{table}\n| e | f |\n")) == ["| e | f |"]
    assert not list(torn_tables(table))
