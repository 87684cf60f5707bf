"""Import strings: unknown names, missing modules and modules that fail are three different stories."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.base.errors import ConfigError
from runtime.base.registry import resolve
from tests.harness.cases import for_each

TABLE = {"path": "pathlib:Path"}


def test_names_and_own_import_strings_are_found() -> None:
    assert resolve("thing", "path", TABLE) is Path
    assert resolve("thing", "collections:deque", TABLE).__name__ == "deque"


@for_each(
    ("name", "says"),
    [
        ("nope", "known: path"),
        ("no_such_module:X", "no module"),
        ("pathlib.no_sub:X", "no module"),
        ("pathlib:No", "has no"),
    ],
)
def test_what_does_not_exist_is_said(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve("thing", name, TABLE)


def test_where_there_are_no_names_none_are_listed() -> None:
    with pytest.raises(ConfigError, match=r"thing 'x': name your own as 'package.module:Name'"):
        resolve("thing", "x", {})


def test_an_error_inside_the_module_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_plugin.py").write_text("import a_module_that_does_not_exist\n")
    with pytest.raises(ModuleNotFoundError, match="a_module_that_does_not_exist"):
        resolve("thing", "broken_plugin:X", TABLE)
