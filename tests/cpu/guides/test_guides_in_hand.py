"""Guides in hand: what the launcher sees of the grammar process's work, and what becomes of requests under
which it died.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grammar_proc.branches import Branches
from grammar_proc.matching.state_maker import StateMaker
from grammar_proc.vocabulary import GrammarVocabulary
from runtime.base.errors import InvalidRequest
from runtime.launcher.deaths.engine_deaths import InHandDeaths
from runtime.ring.endpoints import Endpoints
from runtime.ring.suspects.in_hand import SequencesInHand, place_of, suspect_in_hand
from runtime.ring.suspects.roster import (
    ALWAYS_ALONE,
    GUESSES,
    HYPOTHESES,
    NO_SUSPECTS,
    OUTPUT,
    Roster,
    Suspects,
    size_of,
    suspect_of,
)
from runtime.settings.config import DEMO_MODEL
from runtime.wire.format import NO_CONTENT, pack_ids
from runtime.wire.guide import Guide, MatcherNews
from runtime.wire.handle import make_handle
from runtime.wire.hypotheses import FROM_THE_START, BranchMatchers
from runtime.wire.messages import AdvanceMatchers
from tests.harness.guides.grammar_ring import GrammarRing

NUM_PLACES = 16
HANDLES = [make_handle(7, number) for number in range(4)]
KEYS = [suspect_in_hand(handle) for handle in HANDLES]
WORDS = Guide("regex", "[a-z]{30}")


@pytest.fixture(scope="module")
def vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary(DEMO_MODEL, num_threads=2)


class Watched:
    """A grammar loop whose roster is read whenever a matcher consumes ids or masks are made."""

    def __init__(
        self,
        vocabulary: GrammarVocabulary,
        monkeypatch: pytest.MonkeyPatch,
        suspects: Suspects = NO_SUSPECTS,
    ) -> None:
        self.roster = Roster(bytearray(size_of(NUM_PLACES, 0)), NUM_PLACES)
        self.seen: dict[str, list[set[bytes]]] = {"masks": [], "_consume": []}
        for name, seen in self.seen.items():
            self._watch(monkeypatch, name, seen)
        self.ring = GrammarRing(vocabulary, SequencesInHand(self.roster, suspects))

    def _watch(self, monkeypatch: pytest.MonkeyPatch, name: str, seen: list[set[bytes]]) -> None:
        original: Any = getattr(StateMaker, name)

        def watched(maker: StateMaker, *arguments: Any) -> Any:
            seen.append(self.roster.suspects())
            return original(maker, *arguments)

        monkeypatch.setattr(StateMaker, name, watched)


@pytest.fixture
def watched(vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(vocabulary, monkeypatch)


def test_sequences_are_in_hand_while_their_ids_are_followed_and_their_masks_made(watched: Watched) -> None:
    for handle in HANDLES[:2]:
        watched.ring.open(handle, WORDS, most=4)
    watched.ring.run()
    assert set(KEYS[:2]) in watched.seen["masks"]
    assert {frozenset(each) for each in watched.seen["_consume"]} == {frozenset([key]) for key in KEYS[:2]}
    seen = watched.roster.read()
    assert (seen.present, seen.has_served) == ({}, True)


def test_who_was_there_at_two_deaths_is_in_hand_alone(
    vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: dict[bytes, tuple[bytes, ...]] = {key: (key + bytes([OUTPUT]),) for key in KEYS[2:]}
    suspects = Suspects(alone={KEYS[2]: ALWAYS_ALONE}, watched=dict.fromkeys(KEYS[2:], 0), pieces=pieces)
    watched = Watched(vocabulary, monkeypatch, suspects)
    for handle in HANDLES:
        watched.ring.open(handle, WORDS, most=4)
    watched.ring.run()
    first = next(each for each in watched.seen["masks"] if KEYS[2] in each)
    assert first == {KEYS[2]}
    assert watched.roster.read().past == set(KEYS[2:])
    assert {len(each.ids) for each in watched.ring.sequences.values()} == {4}
    assert set(KEYS) in watched.seen["masks"], "once it is past, it is as others are"


def test_who_was_found_guilty_is_refused_and_others_with_its_guide_go_on(
    vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(vocabulary, monkeypatch, Suspects(guilty=frozenset([KEYS[0]])))
    refused, served = (watched.ring.open(handle, WORDS, most=4) for handle in HANDLES[:2])
    watched.ring.run()
    assert refused.error is not None
    assert (refused.error.code, refused.error.status) == ("quarantined", 400)
    assert "the grammar process has died" in refused.error.message
    assert (served.error, len(served.ids)) == (None, 4)


class Deaths:
    """Grammar processes one after the other, each of which dies, and what the launcher makes of it."""

    def __init__(self, path: Path) -> None:
        self._endpoints = Endpoints(path)
        self._deaths = InHandDeaths(self._endpoints, "grammar")
        self._now_s = 0.0
        self.next()

    def next(self) -> None:
        self.process = SequencesInHand.open(self._endpoints)

    def come_past(self, *handles: bytes, work: int = OUTPUT) -> None:
        """Work on sequences without dying."""
        self.process.show_only([place_of(handle, NO_CONTENT, "", work) for handle in handles])
        self.process.put_all_down()

    def die_of(self, *handles: bytes, work: int = OUTPUT) -> Suspects:
        """Die while sequences are in hand. Returns what the launcher tells the next process."""
        self.process.show_only([place_of(handle, NO_CONTENT, "", work) for handle in handles])
        self._now_s += 1.0
        self._deaths.count(0, self._now_s)
        self.next()
        return Suspects.read(self._endpoints.suspects_file_of("grammar"))


def test_a_request_whose_siblings_have_come_past_a_death_is_not_past_it(tmp_path: Path) -> None:
    """Each of its sequences is followed by itself in the next process, and only one of them ends it."""
    deaths = Deaths(tmp_path)
    harmless, killer, other = (make_handle(7, 5, index) for index in range(3))
    beside = make_handle(7, 6)
    suspects = deaths.die_of(harmless, killer, beside)
    request = suspect_in_hand(killer)
    assert suspects.watched.keys() == {request, suspect_in_hand(beside)}
    deaths.come_past(harmless, beside, other)
    assert deaths.die_of(killer, other).alone.keys() == {request}
    for handle in (harmless, other, beside):
        deaths.come_past(handle)
        assert deaths.process.must_be_alone(suspect_in_hand(killer))
    assert deaths.die_of(killer).guilty == {request}
    with pytest.raises(InvalidRequest, match="the grammar process has died"):
        deaths.process.check(suspect_in_hand(harmless))


def test_a_request_is_past_a_death_when_all_its_sequences_are_that_were_in_hand(tmp_path: Path) -> None:
    deaths = Deaths(tmp_path)
    first, second, later = (make_handle(7, 5, index) for index in range(3))
    for _ in range(2):
        assert suspect_in_hand(first) in deaths.die_of(first, second).watched
    assert deaths.process.must_be_alone(suspect_in_hand(later))
    deaths.come_past(second)
    assert deaths.process.must_be_alone(suspect_in_hand(first))
    deaths.come_past(first)
    assert not deaths.process.must_be_alone(suspect_in_hand(first))
    assert deaths.die_of(make_handle(7, 6)).watched.keys() == {suspect_in_hand(make_handle(7, 6))}


@pytest.mark.parametrize("work", [GUESSES, HYPOTHESES])
def test_work_that_was_not_in_hand_takes_nobody_past_a_death(tmp_path: Path, work: int) -> None:
    """A sequence goes well when it is opened again; its guesses or hypotheses end the process later."""
    deaths = Deaths(tmp_path)
    killer = make_handle(7, 5)
    for _ in range(2):
        deaths.die_of(killer, work=work)
        deaths.come_past(killer)
    assert deaths.process.must_be_alone(suspect_in_hand(killer))
    assert deaths.die_of(killer, work=work).guilty == {suspect_in_hand(killer)}
    deaths.come_past(killer, work=work)


def test_guesses_and_hypotheses_are_in_hand_as_such(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, search = HANDLES[:2]
    for each in (handle, search):
        watched.ring.open(each, WORDS, most=9)
    while watched.ring.loop.num_matchers < 2:
        watched.ring.loop.turn()
    while watched.ring.loop.turn() == 0.0:
        pass
    pieces: list[frozenset[bytes]] = []
    for owner, name in ((StateMaker, "masks"), (Branches, "step")):
        original: Any = getattr(owner, name)

        def noting(made: Any, *arguments: Any, original: Any = original) -> Any:
            pieces.append(watched.roster.read().pieces)
            return original(made, *arguments)

        monkeypatch.setattr(owner, name, noting)
    watched.ring.received += [
        AdvanceMatchers((MatcherNews(handle, 0, guesses=pack_ids([5])),)),
        BranchMatchers(search, 0, ((FROM_THE_START, b""),)),
    ]
    watched.ring.loop.turn()
    assert set(pieces) == {
        frozenset([suspect_of(handle) + bytes([GUESSES])]),
        frozenset([suspect_of(search) + bytes([HYPOTHESES])]),
    }
