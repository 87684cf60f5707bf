"""Docstrings begin with what they are about, so that they stand alone in help()."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import pytest

import carousel
from tests.harness.sources import ROOT, sources

OPENING = re.compile(r'^[ \t]*[rR]?"""(Of|What|Whether|Who|As|and|or)\b', re.M)

ATTRIBUTE = re.compile(r'[^:\s][^\S\n]*(?:#.*)?\n[ \t]*"""(?![A-Z`])[^"\s]', re.M)
"""The docstring of an attribute, that begins with neither a capital nor a backtick."""


def riddles(text: str) -> Iterator[int]:
    """Lines of a module on which a docstring leaves its subject to the reader."""
    for found in (*OPENING.finditer(text), *ATTRIBUTE.finditer(text)):
        yield text.count("\n", 0, found.end()) + 1


def test_docstrings_name_their_subject() -> None:
    product = [path for path in sources() if path.relative_to(ROOT).parts[0] != "tests"]
    assert len(product) > 300
    assert not [f"{path.relative_to(ROOT)}:{line}" for path in product for line in riddles(path.read_text())]


def test_docstrings_of_tests_do_not_begin_in_the_middle_of_a_sentence() -> None:
    tests = [path for path in sources() if path.relative_to(ROOT).parts[0] == "tests"]
    assert len(tests) > 500
    assert not [path for path in tests if OPENING.search(path.read_text())]


@pytest.mark.parametrize(
    "opening",
    ["Of a row.", "What it holds.", "Whether it ends.", "Who waits.", "As base.", "and its end.", "or none."],
)
def test_an_opening_without_a_subject_is_found(opening: str) -> None:
    assert list(riddles(f'class Row:\n    """{opening}"""\n')) == [2]
    assert not list(riddles('class Row:\n    """Whatever of a row is kept."""\n'))


@pytest.mark.parametrize("doc", ["likewise.", "0: none.", "[n] int32.", "of a row."])
def test_an_attributes_docstring_that_does_not_begin_a_sentence_is_found(doc: str) -> None:
    assert list(riddles(f'class Row:\n    ids: bytes = b""  # packed\n    """{doc}"""\n')) == [3]
    for good in ("Ids [n] int32.", "`ids` of the row."):
        assert not list(riddles(f'class Row:\n    """Row."""\n\n    ids: bytes\n    """{good}"""\n'))


def test_every_folder_of_tests_says_what_it_holds() -> None:
    folders = {path.parent for path in sources() if path.relative_to(ROOT).parts[0] == "tests"}
    assert len(folders) > 40
    assert not [
        str(folder.relative_to(ROOT))
        for folder in folders
        if not (folder / "__init__.py").read_text().startswith('"""') and not (folder / "README.md").exists()
    ]


@pytest.mark.parametrize("name", carousel.__all__)
def test_help_says_what_each_public_name_is(name: str) -> None:
    public = getattr(carousel, name)
    methods = [each for each in vars(public) if not each.startswith("_") and callable(getattr(public, each))]
    assert inspect.getdoc(public)
    assert [each for each in methods if not inspect.getdoc(getattr(public, each))] == []
