"""Blame for deaths of the engine: who gets it, and for how long."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from runtime.launcher.deaths import engine_deaths
from runtime.launcher.deaths.engine_deaths import DeathCounts, EngineDeaths, InHandDeaths
from runtime.ring.endpoints import Endpoints
from runtime.ring.suspects.roster import ALWAYS_ALONE, Roster, Seen, Suspects, suspect_of, tenant_mark
from runtime.wire.handle import NO_HANDLE, make_handle

HANDLES = [make_handle(7, number) for number in range(20)]
KEYS = [suspect_of(handle) for handle in HANDLES]
REACHED = 50
ATTACKER = tenant_mark("attacker")


def of(keys: Iterable[bytes], tenant: str = "") -> dict[bytes, str]:
    return dict.fromkeys(keys, tenant)


class Engines:
    """Engines that die, one after the other, a second apart."""

    def __init__(self) -> None:
        self.deaths = DeathCounts()
        self.now_s = 100.0

    def die(
        self,
        running: dict[bytes, str],
        *,
        waiting: dict[bytes, str] | None = None,
        left: dict[bytes, str] | None = None,
        past: Iterable[bytes] = (),
        alone: bytes = NO_HANDLE,
        after_s: float = 1.0,
    ) -> Suspects:
        self.now_s += after_s
        present = {key: tenant_mark(tenant) for key, tenant in (running | (waiting or {})).items()}
        gone = {key: tenant_mark(tenant) for key, tenant in (left or {}).items()}
        seen = Seen(present, gone, dict.fromkeys(running, REACHED), frozenset(past))
        return self.deaths.count(seen, alone, self.now_s)


def test_whoever_had_a_row_at_two_deaths_is_to_run_alone() -> None:
    """It does not matter how far it got between them, nor who else came, went or waited."""
    engines = Engines()
    assert engines.die(of(KEYS[:2]), waiting=of(KEYS[5:])).alone == {}
    assert engines.die(of(KEYS[2:3]), waiting=of(KEYS[5:])).alone == {}
    suspects = engines.die(of(KEYS[1:3]), waiting=of(KEYS[5:]))
    assert suspects.alone == dict.fromkeys(KEYS[1:3], REACHED)
    assert suspects.watched == dict.fromkeys(KEYS[:3], REACHED)


def test_where_nobody_had_a_row_all_are_suspected() -> None:
    engines = Engines()
    engines.die({}, waiting=of(KEYS[:3]))
    assert engines.die({}, waiting=of(KEYS[:2])).alone == dict.fromkeys(KEYS[:2], 0)


def test_who_ran_alone_is_guilty_and_nobody_else_is_suspected_any_more() -> None:
    """It explains the deaths before: otherwise all that it took with it would run alone, one by one."""
    engines = Engines()
    for _ in range(2):
        engines.die(of(KEYS[:3]))
    # It may have been made again since: the page shows another attempt of the same sequence.
    alone = make_handle(7, 1, attempt=2)
    suspects = engines.die(of(KEYS[1:2]), waiting=of(KEYS[:1]), alone=alone)
    assert suspects == Suspects(guilty=frozenset([KEYS[1]]))
    assert engines.die(of(KEYS[:1]), alone=HANDLES[3]).guilty == {KEYS[1]}, "one that has ended was not there"


def test_who_has_come_past_a_death_is_not_suspected_of_it() -> None:
    engines = Engines()
    engines.die(of(KEYS[:3]))
    assert engines.die(of(KEYS[:3]), past=KEYS[:2]).alone == {KEYS[2]: REACHED}


def test_who_comes_past_while_it_is_alone_and_is_there_again_stays_alone_in_the_end() -> None:
    """It may be that it ends the engine only beside another."""
    engines = Engines()
    for _ in range(2):
        engines.die(of(KEYS[:2]))
    assert engines.die(of(KEYS[:2]), past=KEYS[:2]).alone == {}
    assert engines.die(of(KEYS[:2])).alone == dict.fromkeys(KEYS[:2], ALWAYS_ALONE)


def test_who_comes_with_something_else_under_its_name_is_known_by_its_content() -> None:
    """It has the handle of a suspect and other content, and runs when another request ends the engine."""
    engines = Engines()
    poison, other, harmless = (suspect_of(HANDLES[1], 8 * each) for each in (b"p", b"o", b"h"))
    engines.die(of([poison, KEYS[2]]))
    suspects = engines.die(of([harmless, KEYS[3]]))
    assert suspects.alone == {}
    assert engines.deaths.verdict.explained[101.0], "neither has come again"
    engines.die(of([poison, other]))
    assert engines.die(of([poison]), waiting=of([harmless]), alone=HANDLES[1]).guilty == {poison}


# -- tenants -----------------------------------------------------------------------------------------------


def test_a_tenant_whose_requests_end_the_engine_and_are_never_seen_again_is_suspended() -> None:
    """The caller hangs up each time. All others come past the point of the death, so only they are left."""
    engines, others = Engines(), of(KEYS[:3], "victim")
    for number in range(3, 7):
        suspects = engines.die(others | of(KEYS[number : number + 1], "attacker"), past=KEYS[:3])
        assert not suspects.alone.keys() & set(KEYS[:3]), "of the others nobody runs alone"
        assert bool(suspects.suspended) == (number == 6)
    assert suspects.suspended == {ATTACKER: engines.now_s + engine_deaths.SUSPENSION_S}


def test_who_hangs_up_while_the_fatal_step_is_computed_is_suspended_and_nobody_else() -> None:
    """Also if the only other tenant's sequences never come again: it may have been either then."""
    engines = Engines()
    for number in range(6):
        beside = of(KEYS[number : number + 1], "victim")
        assert not engines.die(beside, left=of(KEYS[number + 10 : number + 11], "attacker")).suspended
    for number in range(6, 10):
        suspects = engines.die({}, left=of(KEYS[number : number + 1], "attacker"), past=KEYS[:6])
    assert suspects.suspended.keys() == {ATTACKER}


def test_one_guilty_sequence_suspends_nobody_and_two_do() -> None:
    engines = Engines()
    for _ in range(2):
        engines.die(of(KEYS[:1], "victim") | of(KEYS[1:4], "attacker"))
    assert not engines.die(of(KEYS[1:2], "attacker"), alone=HANDLES[1]).suspended
    suspects = engines.die(of(KEYS[:1], "victim") | of(KEYS[2:3], "attacker"))
    assert suspects.alone == {KEYS[2]: REACHED}, "one death is enough for a tenant that is known"
    assert engines.die(of(KEYS[2:3], "attacker"), alone=HANDLES[2]).suspended.keys() == {ATTACKER}


def test_nobody_is_suspended_for_what_several_tenants_may_have_done() -> None:
    engines = Engines()
    for number in range(6):
        left = of([KEYS[number]], "a") | of([KEYS[number + 10]], "b")
        assert not engines.die(left).suspended


def test_no_strike_stays_for_what_came_past_in_an_engine_that_was_killed() -> None:
    """Otherwise three kills between three faults suspend a tenant of which all requests were answered."""
    engines = Engines()
    for number in range(6):
        assert not engines.die(of([KEYS[number]], "victim")).suspended
        past = Seen(past=frozenset([KEYS[number]]))
        assert engines.deaths.note_end(past, engines.now_s).watched == {}


def test_what_an_engine_served_that_was_killed_is_not_served_in_vain() -> None:
    deaths = DeathCounts()
    deaths.note_end(Seen(has_served=True), 1.0)
    deaths.count(Seen(), NO_HANDLE, 2.0)
    assert deaths.verdict.has_served
    deaths.count(Seen(), NO_HANDLE, 3.0)
    assert not deaths.verdict.has_served


def test_the_owner_is_never_suspended() -> None:
    engines = Engines()
    for number in range(8):
        assert not engines.die(of([KEYS[number]])).suspended


def test_strikes_are_forgotten_and_a_suspension_is_longer_each_time() -> None:
    engines = Engines()
    for number in range(6):
        rare = engines.die(of([KEYS[number]], "attacker"), after_s=engine_deaths.STRIKE_S / 2)
        assert not rare.suspended
    lengths: list[tuple[float, float]] = []
    for number in range(6, 18):
        suspects = engines.die(of([KEYS[number]], "attacker"), after_s=61.0)
        until_s = suspects.suspended.get(ATTACKER, 0.0)
        if until_s > engines.now_s and not any(until_s == each for each, _ in lengths):
            lengths.append((until_s, until_s - engines.now_s))
    assert [length for _, length in lengths][:3] == [60.0, 120.0, 240.0]


def test_counts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_deaths, "MAX_COUNTED", 100)
    engines = Engines()
    for start in range(0, 2000, 50):
        suspects = engines.die(of(suspect_of(make_handle(7, start + each)) for each in range(50)))
    assert len(suspects.watched) == 50 * engine_deaths.MAX_DEATHS
    assert len(engines.deaths._times) == 100


def test_the_next_engine_reads_what_the_launcher_has_counted(tmp_path: Path) -> None:
    endpoints = Endpoints(tmp_path)
    deaths = EngineDeaths(endpoints)
    deaths.count(NO_HANDLE, 1.0)
    assert Suspects.read(endpoints.suspects_file) == Suspects()
    shown = Roster.create(endpoints.roster_file, 4)
    shown.add(KEYS[0])
    shown.add(KEYS[1])
    deaths.count(NO_HANDLE, 2.0)
    deaths.count(NO_HANDLE, 3.0)
    assert Suspects.read(endpoints.suspects_file).alone == dict.fromkeys(KEYS[:2], 0)
    deaths.count(HANDLES[1], 4.0)
    assert Suspects.read(endpoints.suspects_file) == Suspects(guilty=frozenset([KEYS[1]]))


def test_the_next_process_watches_nobody_who_came_past_in_one_that_was_killed(tmp_path: Path) -> None:
    endpoints = Endpoints(tmp_path)
    deaths, texts = EngineDeaths(endpoints), InHandDeaths(endpoints, "tokenizer")

    def rosters() -> list[Roster]:
        paths = (endpoints.roster_file, endpoints.in_hand_file("tokenizer", 0))
        return [Roster.create(path, 4) for path in paths]

    for shown in rosters():
        shown.add(KEYS[0])
        shown.add(KEYS[1])
    deaths.count(NO_HANDLE, 1.0)
    texts.count(0, 1.0)
    for shown in rosters():
        shown.note_past(KEYS[0])
    deaths.note_end(2.0)
    texts.note_end(0, 2.0)
    for file in (endpoints.suspects_file, endpoints.suspects_file_of("tokenizer")):
        assert Suspects.read(file).watched.keys() == {KEYS[1]}
