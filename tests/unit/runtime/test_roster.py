"""The file of an engine's sequences, which is read when it has died, and what the next one is told."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from runtime.base.errors import ConfigError
from runtime.ring.suspects.roster import Roster, RowViews, Seen, Suspects, suspect_of, tenant_mark
from runtime.wire.handle import make_handle

HANDLES = [make_handle(7, number) for number in range(6)]
KEYS = [suspect_of(handle) for handle in HANDLES]


def test_a_roster_shows_who_is_there(tmp_path: Path) -> None:
    shown = Roster.create(tmp_path / "roster", 3)
    for key in KEYS[:4]:
        shown.add(key)
    assert shown.suspects() == set(KEYS[:3]), "one that is full takes no more"
    shown.discard(KEYS[1])
    shown.discard(KEYS[3])
    shown.add(KEYS[4])
    assert shown.suspects() == {KEYS[0], KEYS[2], KEYS[4]}
    assert Roster.create(tmp_path / "roster", 3).suspects() == set()


def test_a_roster_that_has_no_room_names_its_file_and_its_size() -> None:
    with pytest.raises(ConfigError, match=r"run_dir: /dev/full: .*; it takes \d+ bytes"):
        Roster.create(Path("/dev/full"), 3)


def test_a_roster_repeats_the_rows_of_the_newest_step(tmp_path: Path) -> None:
    shown = Roster.create(tmp_path / "roster", 8, num_rows=3)
    handles, reached, stays = bytearray(3 * 16), array("i", [0, 0, 0]), array("q", [0, 0, 0])
    views = (memoryview(reached).cast("B"), memoryview(stays).cast("B"))
    shown.watch(RowViews(memoryview(handles), *views))
    for key in KEYS[:4]:
        shown.add(key, "alice")
    handles[:16], handles[32:] = HANDLES[0], make_handle(7, 2, attempt=5)
    reached[0], reached[2], stays[0], stays[2] = 30, 70_000, 1, 2
    assert shown.read().running == {}
    shown.note_step()
    stays[0] = 0
    shown.note_past(KEYS[3])
    seen = Seen.decode((tmp_path / "roster").read_bytes())
    assert seen.running == {KEYS[0]: 30, KEYS[2]: 70_000}
    assert seen.past == {KEYS[3]}
    assert set(seen.present.values()) == {tenant_mark("alice")}
    shown.discard(KEYS[2])
    assert shown.read().running == {KEYS[0]: 30}, "one that has ended does not come again"
    shown.note_step()
    assert shown.read().running == {}


def test_one_that_ends_early_is_shown_until_the_steps_that_may_have_it_have_ended(tmp_path: Path) -> None:
    """A caller who hangs up while the fatal step is computed is neither forgotten nor waited for."""
    shown = Roster.create(tmp_path / "roster", 3)
    for key in KEYS[:3]:
        shown.add(key, "alice")
    shown.leave(KEYS[2])
    assert shown.read() == Seen(dict.fromkeys(KEYS[:2], tenant_mark("alice"))), "no step is in flight"
    shown.note_step()
    shown.leave(KEYS[0])
    shown.note_step()
    shown.leave(KEYS[1])
    shown.add(KEYS[0], "alice")
    both = dict.fromkeys(KEYS[:2], tenant_mark("alice"))
    seen = Seen.decode((tmp_path / "roster").read_bytes())
    assert (seen.present, seen.left) == ({KEYS[0]: tenant_mark("alice")}, both)
    shown.note_step_end()
    assert shown.read().left.keys() == {KEYS[1]}
    shown.add(KEYS[3], "bob")
    assert shown.read().present == {KEYS[0]: tenant_mark("alice"), KEYS[3]: tenant_mark("bob")}
    shown.note_step_end()
    assert shown.read().left == {}


def test_rows_that_the_file_has_no_places_for_are_left_out(tmp_path: Path) -> None:
    shown = Roster.create(tmp_path / "roster", 2, num_rows=1)
    shown.watch(RowViews(memoryview(bytes(32)), memoryview(bytes(8)), memoryview(bytes(16))))
    shown.add(KEYS[0])
    shown.note_step()
    assert shown.read() == Seen({KEYS[0]: tenant_mark("")})


def test_suspects_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert Suspects.read(tmp_path / "suspects") == Suspects()
    said = Suspects({KEYS[0]: 7}, {KEYS[1]: 8}, frozenset([KEYS[2]]), {tenant_mark("alice"): 9.5})
    assert Suspects.decode(said.encode()) == said
