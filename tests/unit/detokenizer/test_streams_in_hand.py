"""Streams in hand: what the launcher sees of a detokenizer's work, and what becomes of those of which
detokenizers die.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from detokenizer_proc.text_stream import TextStream
from runtime.base.errors import StartError
from runtime.launcher.deaths.death_causes import JUDGED_ROLES
from runtime.launcher.deaths.engine_deaths import InHandDeaths
from runtime.launcher.deaths.restart_budget import IN_VAIN_FACTOR, RestartBudget
from runtime.ring.endpoints import Endpoints
from runtime.ring.suspects.in_hand import StreamsInHand, suspect_in_hand
from runtime.ring.suspects.roster import NO_SUSPECTS, Roster, Suspects, size_of, suspect_of
from runtime.text.tokenizer import Tokenizer
from runtime.wire.handle import make_handle
from runtime.wire.messages import AbortRequest
from tests.harness.ring.detokenizer_ring import Ring

NUM_PLACES = 4
LIMIT = 10
CONTENT = b"content!"


class Watched:
    """A detokenizer loop whose roster is read whenever a stream takes a token."""

    def __init__(
        self,
        demo: Tokenizer,
        monkeypatch: pytest.MonkeyPatch,
        suspects: Suspects = NO_SUSPECTS,
        *,
        is_shown: bool = True,
    ) -> None:
        self.roster = Roster(bytearray(size_of(NUM_PLACES, 0)), NUM_PLACES)
        self.seen: list[set[bytes]] = []
        self.ring = Ring(demo, in_hand=StreamsInHand(self.roster, suspects, is_shown=is_shown))
        for name in ("__init__", "push", "close", "replay"):
            self._watch(monkeypatch, name)

    def _watch(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        original: Any = getattr(TextStream, name)

        def watched(stream: TextStream, *arguments: Any, **options: Any) -> Any:
            self.seen.append(self.roster.suspects())
            return original(stream, *arguments, **options)

        monkeypatch.setattr(TextStream, name, watched)


def test_a_stream_is_in_hand_by_itself_while_it_is_worked_on(
    demo: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(demo, monkeypatch)
    ring = watched.ring
    handles = [ring.open(ring.handle(number), content=CONTENT) for number in range(2)]
    ring.step(*((handle, 70) for handle in handles))
    assert not watched.roster.suspects()
    ring.close(handles[0])
    names = [suspect_of(handle, CONTENT) for handle in handles]
    assert watched.seen == [{name} for name in (*names, *names, names[0])]
    seen = watched.roster.read()
    assert (seen.present, seen.has_served) == ({}, True)


def test_nothing_is_shown_before_a_detokenizer_has_died(
    demo: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(demo, monkeypatch, is_shown=False)
    ring = watched.ring
    handle = ring.open(ring.handle())
    ring.step((handle, 70))
    ring.close(handle)
    assert watched.seen == [set()] * 3


def test_a_stream_is_past_a_death_when_it_has_all_of_its_text(
    demo: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the last token. One whose caller has left has not come to its end."""
    watched = Watched(demo, monkeypatch)
    ring = watched.ring
    handles = [ring.handle(number) for number in range(2)]
    names = [suspect_in_hand(handle) for handle in handles]
    pieces: dict[bytes, tuple[bytes, ...]] = {
        name: (suspect_of(handle) + b"\0",) for name, handle in zip(names, handles, strict=True)
    }
    in_hand = StreamsInHand(
        watched.roster, Suspects(watched=dict.fromkeys(names, 0), pieces=pieces), is_shown=True
    )
    ring.loop._in_hand = in_hand
    for handle in handles:
        ring.open(handle)
        ring.step((handle, 70))
    assert not watched.roster.read().past
    ring.close(handles[0])
    ring.close(handles[1], "abort")
    assert watched.roster.read().past == {names[0]}


def test_a_stream_of_which_detokenizers_have_died_is_refused_and_ends(
    demo: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(demo, monkeypatch)
    ring = watched.ring
    handle, other = ring.handle(), ring.handle(1)
    guilty = Suspects(guilty=frozenset([suspect_in_hand(handle, CONTENT)]))
    ring.loop._in_hand = StreamsInHand(watched.roster, guilty, is_shown=True)
    ring.open(handle, content=CONTENT)
    ring.open(other, content=CONTENT)
    error = ring.terminal(handle).error
    assert (error.code, error.status) == ("quarantined", 400)
    assert "the detokenizer has died" in error.message
    assert AbortRequest((handle,)) in ring.scheduler.drain()
    assert ring.loop.num_live == 1


class Deaths:
    """Detokenizers one after the other, each of which dies a second after the one before."""

    def __init__(self, path: Path) -> None:
        assert "detokenizer" in JUDGED_ROLES
        self._endpoints = Endpoints(path)
        self._deaths = InHandDeaths(self._endpoints, "detokenizer")
        self._budget = RestartBudget(60.0)
        self._now_s = 0.0

    def die_of(self, handle: bytes, content: bytes = CONTENT, ended: bytes = b"") -> Suspects:
        """Die of a stream, after another has come to its end. Raises StartError if that ends the launch."""
        in_hand = StreamsInHand.open_of(self._endpoints, 0)
        if ended:
            in_hand.finish(in_hand.take(ended, content))
        in_hand.take(handle, content)
        self._now_s += 1.0
        verdict = self._deaths.count(0, self._now_s)
        self._budget.spend("detokenizer0", LIMIT, self._now_s, from_outside=False, verdict=verdict)
        return Suspects.read(self._endpoints.suspects_file_of("detokenizer"))


def test_what_ends_detokenizers_is_known_after_three_deaths(tmp_path: Path) -> None:
    """Nothing is known of the first one."""
    deaths, killer = Deaths(tmp_path), make_handle(7, 1)
    assert not deaths.die_of(killer).watched
    assert deaths.die_of(killer).watched.keys() == {suspect_in_hand(killer, CONTENT)}
    assert deaths.die_of(killer).guilty == {suspect_in_hand(killer, CONTENT)}


def test_a_caller_who_hangs_up_after_each_death_does_not_end_the_launch(tmp_path: Path) -> None:
    deaths = Deaths(tmp_path)
    for number in range(3 * LIMIT):
        deaths.die_of(make_handle(7, number), ended=make_handle(8, number))


def test_a_detokenizer_that_finishes_nothing_ends_the_launch(tmp_path: Path) -> None:
    deaths = Deaths(tmp_path)
    for number in range(IN_VAIN_FACTOR * LIMIT):
        deaths.die_of(make_handle(7, number))
    with pytest.raises(StartError, match="without serving one request"):
        deaths.die_of(make_handle(8, 0))
