"""Guides in hand: what the launcher sees of the grammar process's work, and what becomes of requests under
which it died.
"""

from __future__ import annotations

from typing import Any

import pytest

from grammar_proc.matchers import Matchers
from grammar_proc.vocabulary import GrammarVocabulary
from runtime.ring.suspects.in_hand import SequencesInHand, request_key
from runtime.ring.suspects.roster import ALWAYS_ALONE, NO_SUSPECTS, Roster, Suspects, size_of
from runtime.settings.config import DEMO_MODEL
from runtime.wire.guide import Guide
from runtime.wire.handle import make_handle
from tests.harness.guides.grammar_ring import GrammarRing

NUM_PLACES = 16
HANDLES = [make_handle(7, number) for number in range(4)]
KEYS = [request_key(handle) for handle in HANDLES]
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
        self.seen: dict[str, list[set[bytes]]] = {"_masks": [], "_consume": []}
        for name, seen in self.seen.items():
            self._watch(monkeypatch, name, seen)
        self.ring = GrammarRing(vocabulary, SequencesInHand(self.roster, suspects))

    def _watch(self, monkeypatch: pytest.MonkeyPatch, name: str, seen: list[set[bytes]]) -> None:
        original: Any = getattr(Matchers, name)

        def watched(matchers: Matchers, *arguments: Any) -> Any:
            seen.append(self.roster.keys())
            return original(matchers, *arguments)

        monkeypatch.setattr(Matchers, name, watched)


@pytest.fixture
def watched(vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(vocabulary, monkeypatch)


def test_sequences_are_in_hand_while_their_ids_are_followed_and_their_masks_made(watched: Watched) -> None:
    for handle in HANDLES[:2]:
        watched.ring.open(handle, WORDS, most=4)
    watched.ring.run()
    assert set(KEYS[:2]) in watched.seen["_masks"]
    assert {frozenset(each) for each in watched.seen["_consume"]} == {frozenset([key]) for key in KEYS[:2]}
    seen = watched.roster.read()
    assert (seen.present, seen.has_served) == ({}, True)


def test_who_was_there_at_two_deaths_is_in_hand_alone(
    vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    suspects = Suspects(alone={KEYS[2]: ALWAYS_ALONE}, watched={KEYS[2]: 0, KEYS[3]: 0})
    watched = Watched(vocabulary, monkeypatch, suspects)
    for handle in HANDLES:
        watched.ring.open(handle, WORDS, most=4)
    watched.ring.run()
    first = next(each for each in watched.seen["_masks"] if KEYS[2] in each)
    assert first == {KEYS[2]}
    assert watched.roster.read().past == set(KEYS[2:])
    assert {len(each.ids) for each in watched.ring.sequences.values()} == {4}
    assert set(KEYS) in watched.seen["_masks"], "once it is past, it is as others are"


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
