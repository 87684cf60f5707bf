"""Which sequences an engine had when it died, and what the next one is told of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.base.errors import ConfigError
from runtime.ring import roster
from runtime.ring.endpoints import Endpoints
from runtime.ring.roster import DeathCounts, EngineDeaths, Roster, Suspects
from runtime.wire.handle import NO_HANDLE, make_handle, sequence_key

HANDLES = [make_handle(7, number) for number in range(6)]
KEYS = [sequence_key(handle) for handle in HANDLES]


def test_a_roster_shows_who_is_there(tmp_path: Path) -> None:
    shown = Roster.create(tmp_path / "roster", 3)
    for key in KEYS[:4]:
        shown.add(key)
    assert shown.keys() == set(KEYS[:3]), "one that is full takes no more"
    shown.discard(KEYS[1])
    shown.discard(KEYS[3])
    shown.add(KEYS[4])
    assert shown.keys() == {KEYS[0], KEYS[2], KEYS[4]}
    assert Roster.create(tmp_path / "roster", 3).keys() == set()


def test_a_roster_that_has_no_room_names_its_file_and_its_size() -> None:
    with pytest.raises(ConfigError, match=r"run_dir: /dev/full: .*; it takes \d+ bytes"):
        Roster.create(Path("/dev/full"), 3)


def test_whoever_was_there_at_two_deaths_is_to_run_alone() -> None:
    """However far it got between them, and whoever else came and went."""
    deaths = DeathCounts()
    assert deaths.count({KEYS[0], KEYS[1]}, NO_HANDLE) == Suspects()
    assert deaths.count({KEYS[2]}, NO_HANDLE) == Suspects()
    assert deaths.count({KEYS[1], KEYS[2]}, NO_HANDLE) == Suspects(frozenset(KEYS[1:3]))


def test_who_ran_alone_is_guilty_and_nobody_else() -> None:
    deaths = DeathCounts()
    for _ in range(2):
        deaths.count(set(KEYS[:3]), NO_HANDLE)
    # It may have been made again since: the page shows another attempt of the same sequence.
    alone = make_handle(7, 1, attempt=2)
    assert deaths.count(set(KEYS[:3]), alone) == Suspects(frozenset([KEYS[0], KEYS[2]]), frozenset([KEYS[1]]))
    assert deaths.count({KEYS[0]}, HANDLES[3]).guilty == {KEYS[1]}, "one that has ended was not there"


def test_counts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "MAX_COUNTED", 100)
    deaths = DeathCounts()
    for start in range(0, 300, 50):
        present = {sequence_key(make_handle(7, number)) for number in range(start, start + 50)}
        for _ in range(2):
            suspects = deaths.count(present, NO_HANDLE)
    assert len(suspects.alone) == 100


def test_the_next_engine_reads_what_the_launcher_has_counted(tmp_path: Path) -> None:
    endpoints = Endpoints(tmp_path)
    deaths = EngineDeaths(endpoints)
    deaths.count(NO_HANDLE)
    assert Suspects.read(endpoints.suspects_file) == Suspects()
    shown = Roster.create(endpoints.roster_file, 4)
    shown.add(KEYS[0])
    shown.add(KEYS[1])
    deaths.count(NO_HANDLE)
    deaths.count(NO_HANDLE)
    deaths.count(HANDLES[1])
    assert Suspects.read(endpoints.suspects_file) == Suspects(frozenset([KEYS[0]]), frozenset([KEYS[1]]))
