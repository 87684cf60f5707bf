"""The table of adapters that the processes of a launch share."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from runtime.ring.adapters_file import FIRST_ID, AdaptersFile, ListedAdapter, Wanted

LAUNCHED = {"a": "/a", "b": "/b"}


def test_the_launchs_adapters_stand_until_somebody_changes_them(tmp_path: Path) -> None:
    mine, other = (AdaptersFile(tmp_path / "adapters.json", LAUNCHED) for _ in range(2))
    assert other.read() == {"a": ListedAdapter("/a", FIRST_ID), "b": ListedAdapter("/b", FIRST_ID + 1)}
    mine.change("c", lambda listed: Wanted("/c"))
    mine.change("a", lambda listed: None)
    assert dict(other.read()) == {
        "b": ListedAdapter("/b", FIRST_ID + 1),
        "c": ListedAdapter("/c", FIRST_ID + 2),
    }


def test_an_id_stands_for_one_path(tmp_path: Path) -> None:
    table = AdaptersFile(tmp_path / "adapters.json", LAUNCHED)
    table.change("a", lambda listed: Wanted("/a"))
    assert table.read()["a"].id == FIRST_ID
    table.change("a", lambda listed: Wanted("/other"))
    assert table.read()["a"] == ListedAdapter("/other", FIRST_ID + 2)
    table.change("a", lambda listed: None)
    table.change("a", lambda listed: Wanted("/a"))
    assert table.read()["a"] == ListedAdapter("/a", FIRST_ID + 3)


def test_an_id_stands_for_a_pin_that_was_set_once(tmp_path: Path) -> None:
    table = AdaptersFile(tmp_path / "adapters.json", LAUNCHED)
    for number, pinned in enumerate((True, True, False, False)):
        before = table.read()["a"]
        assert table.change("a", lambda listed, pinned=pinned: Wanted("/a", pinned)) == before  # type: ignore[misc]
        assert table.read()["a"] == ListedAdapter("/a", FIRST_ID + 2 + min(number, 2), pinned)


def test_who_decides_otherwise_changes_nothing(tmp_path: Path) -> None:
    table = AdaptersFile(tmp_path / "adapters.json", LAUNCHED)

    def refuse(listed: Mapping[str, ListedAdapter]) -> Wanted:
        assert listed["a"] == ListedAdapter("/a", FIRST_ID)
        raise LookupError("not this one")

    with pytest.raises(LookupError, match="not this one"):
        table.change("a", refuse)
    assert table.read()["a"].path == "/a"


def test_changes_at_the_same_time_are_all_there(tmp_path: Path) -> None:
    def add(number: int) -> None:
        AdaptersFile(tmp_path / "adapters.json", {}).change(f"n{number}", lambda _: Wanted(f"/{number}"))

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(add, range(40)))
    listed = AdaptersFile(tmp_path / "adapters.json", {}).read()
    assert {name: each.path for name, each in listed.items()} == {f"n{i}": f"/{i}" for i in range(40)}
    assert len({each.id for each in listed.values()}) == 40
