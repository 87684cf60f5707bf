"""Requests in hand: what the launcher sees of a tokenizer's work, and what becomes of those under which
tokenizers died.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from runtime.base.errors import Overloaded
from runtime.launcher.deaths.engine_deaths import InHandDeaths
from runtime.ring.endpoints import Endpoints
from runtime.ring.suspects.content import content_of_request
from runtime.ring.suspects.in_hand import TextsInHand, suspect_in_hand
from runtime.ring.suspects.roster import ALWAYS_ALONE, NO_SUSPECTS, Roster, Suspects, size_of, tenant_mark
from runtime.text.tokenizer import Tokenizer
from runtime.wire.format import IntArray, pack_ids
from runtime.wire.handle import make_handle, sequence_key
from runtime.wire.messages import RequestFailed
from runtime.wire.sampling_params import SamplingParams
from runtime.wire.status_page import ProcessStatus
from tests.harness.ring.tokenizer_ring import (
    LONG_TEXT,
    GatedTokenizer,
    Ring,
    handle,
    passed_on,
    refusal,
    request,
)
from tokenizer_proc.long_texts import LongTexts

NUM_PLACES = 16
KEYS = [sequence_key(handle(number)) for number in range(8)]


def named(number: int, **fields: Any) -> bytes:
    """Return the name that a request has in hand."""
    return suspect_in_hand(handle(number), content_of_request(request(number, **fields), b""))


def keys_in(roster: Roster) -> set[bytes]:
    return set(map(sequence_key, roster.suspects()))


def empty_roster() -> Roster:
    return Roster(bytearray(size_of(NUM_PLACES, 0)), NUM_PLACES)


class WatchedTokenizer(GatedTokenizer):
    """Notes what is in hand whenever it encodes."""

    def __init__(self, loaded: Tokenizer, roster: Roster) -> None:
        super().__init__(loaded)
        self.seen: list[set[bytes]] = []
        self._roster = roster

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[IntArray]:
        ids = super().encode_batch(texts, add_special_tokens=add_special_tokens)
        self.seen.append(keys_in(self._roster))
        return ids


class Watched:
    """A tokenizer loop, and what is in hand while it encodes."""

    def __init__(self, demo: Tokenizer, suspects: Suspects = NO_SUSPECTS, *, now_s: float = 0.0) -> None:
        self.roster = empty_roster()
        self.tokenizer = WatchedTokenizer(demo, self.roster)
        in_hand = TextsInHand(self.roster, suspects, has_tenants=lambda: True, clock=lambda: now_s)
        self.ring = Ring(self.tokenizer, in_hand=in_hand)


def test_requests_are_in_hand_while_their_texts_are_read_and_not_after(demo: Tokenizer) -> None:
    watched = Watched(demo)
    assert len(passed_on(watched.ring, request(1, text="a"), request(2, text="b"))) == 2
    assert watched.tokenizer.seen == [{KEYS[1], KEYS[2]}]
    seen = watched.roster.read()
    assert (seen.present, seen.has_served) == ({}, True)


def test_sequences_of_one_request_are_in_hand_until_the_last_is_put_down(demo: Tokenizer) -> None:
    watched = Watched(demo)
    siblings = [request(1, text="a", handle=make_handle(77, 1, index)) for index in range(3)]
    long = request(1, text=LONG_TEXT, handle=make_handle(77, 1, 4))
    assert len(passed_on(watched.ring, long, *siblings)) == 3
    watched.tokenizer.gate.set()
    watched.ring.wait_for_long()
    assert watched.tokenizer.seen == [{KEYS[1]}, {KEYS[1]}]
    assert not keys_in(watched.roster)
    assert len(watched.roster._free) == NUM_PLACES


def test_a_long_text_is_in_hand_while_a_thread_reads_it(demo: Tokenizer) -> None:
    watched = Watched(demo)
    ring = watched.ring
    assert passed_on(ring, request(1, text=LONG_TEXT)) == []
    assert len(passed_on(ring, request(2, text="b"))) == 1
    watched.tokenizer.gate.set()
    ring.wait_for_long()
    ring.loop.turn()
    assert len(ring.scheduler.drain()) == 1
    assert KEYS[1] in watched.tokenizer.seen[-1]
    assert not keys_in(watched.roster)


def test_sequences_of_one_request_are_one_that_may_be_guilty(demo: Tokenizer) -> None:
    """After the first death each of them comes by itself."""
    watched = Watched(
        demo, Suspects(guilty=frozenset([named(1, text="a", sampling=SamplingParams(n=3, seed=9))]))
    )
    siblings = [
        request(1, text="a", handle=make_handle(77, 1, index), sampling=SamplingParams(seed=9 + index))
        for index in (1, 2)
    ]
    assert passed_on(watched.ring, *siblings) == []
    assert [refused.error.code for refused in watched.ring.refusals()] == ["quarantined"] * 2


@pytest.mark.parametrize("text", ["short", LONG_TEXT], ids=["short", "long"])
def test_who_was_there_at_two_deaths_is_in_hand_alone(demo: Tokenizer, text: str) -> None:
    """It waits for the threads, and what comes behind it waits for it."""
    name = named(2, text=text)
    watched = Watched(demo, Suspects(alone={name: ALWAYS_ALONE}, watched={name: 0}))
    ring = watched.ring
    long, suspect, behind = request(1, text=LONG_TEXT), request(2, text=text), request(3, text="c")
    assert passed_on(ring, long, request(4, text="d"), suspect, behind)[0].handle == handle(4)
    for _ in range(3):
        assert passed_on(ring) == []
        assert ring.loop.is_busy
        assert not watched.roster.read().past
    watched.tokenizer.gate.set()
    order: list[bytes] = []
    for _ in range(5):
        ring.wait_for_long()
        ring.loop.turn()
        order += [sequence.handle for sequence in ring.scheduler.drain()]
    assert order == [handle(1), handle(2), handle(3)]
    assert {KEYS[2]} in watched.tokenizer.seen
    assert all(KEYS[2] not in seen or len(seen) == 1 for seen in watched.tokenizer.seen)
    assert watched.roster.read().past == {name}
    assert not ring.loop.is_busy


def test_who_was_found_guilty_is_refused_and_those_beside_it_are_served(demo: Tokenizer) -> None:
    watched = Watched(demo, Suspects(guilty=frozenset([named(1, text="a")])))
    assert len(passed_on(watched.ring, request(1, text="a"), request(2, text="b"))) == 1
    (refused,) = watched.ring.refusals()
    assert isinstance(refused, RequestFailed)
    assert (refused.handle, refused.error.code, refused.error.status) == (handle(1), "quarantined", 400)
    assert "the tokenizer has died" in refused.error.message


def test_nothing_is_served_of_a_tenant_that_is_suspended_until_its_time_is_over(demo: Tokenizer) -> None:
    suspects = Suspects(suspended={tenant_mark("a"): 60.0})
    late = Watched(demo, suspects, now_s=61.0)
    assert len(passed_on(late.ring, request(1, text="a", tenant="a"))) == 1
    watched = Watched(demo, suspects, now_s=20.0)
    requests = [request(number, text="a", tenant=name) for number, name in enumerate(("a", "b", ""))]
    assert len(passed_on(watched.ring, *requests)) == 2
    (refused,) = watched.ring.refusals()
    assert (refused.error.code, refused.error.status) == ("key_suspended", 429)
    assert refused.error.retry_after_s == 40.0


def test_the_launcher_finds_out_whose_text_ends_tokenizers_whichever_it_comes_to(tmp_path: Path) -> None:
    endpoints = Endpoints(tmp_path)
    deaths = InHandDeaths(endpoints, "tokenizer")

    def die(index: int, now_s: float, *numbers: int) -> Suspects:
        in_hand = TextsInHand(Roster.create(endpoints.in_hand_file("tokenizer", index), NUM_PLACES))
        for number in numbers:
            in_hand.take(request(number, sampling=SamplingParams(n=3)))
        verdicts.append(deaths.count(index, now_s))
        return Suspects.read(endpoints.suspects_file_of("tokenizer"))

    verdicts = [deaths.count(0, 0.0)]
    assert not verdicts[0].explained[0.0], "nobody was there"
    names = [named(number, sampling=SamplingParams(n=3)) for number in range(4)]
    assert die(0, 1.0, 1, 2, 3).alone == {}
    assert die(1, 2.0, 2, 3, 4).alone.keys() == {names[2], names[3]}
    assert die(0, 3.0, 2).guilty == {names[2]}
    assert verdicts[-1].explained == {1.0: True, 2.0: True, 3.0: True}
    assert die(0, 4.0, 5).guilty == {names[2]}, "of one that was not to be alone nothing is known"


def test_a_text_that_waits_for_a_thread_is_neither_in_hand_nor_past_a_death() -> None:
    roster, long = empty_roster(), request(1, text=LONG_TEXT)
    name = named(1, text=LONG_TEXT)
    in_hand = TextsInHand(roster, Suspects(alone={name: ALWAYS_ALONE}, watched={name: 0}))
    assert in_hand.take(long) == name
    work = in_hand.later(name, "", roster.suspects)
    in_hand.end_turn()
    seen = roster.read()
    assert (seen.present, seen.past, seen.has_served) == ({}, frozenset(), False)
    assert in_hand.is_for_alone(long)
    assert work() == {name}
    assert roster.read().past == {name}
    assert not in_hand.is_for_alone(long)


def test_a_request_that_is_passed_on_is_no_longer_in_hand_while_texts_behind_it_are_read(
    demo: Tokenizer,
) -> None:
    name = named(1, input_ids=pack_ids([5, 6]))
    watched = Watched(demo, Suspects(watched={name: 0}))
    ids = request(1, input_ids=pack_ids([5, 6]))
    assert len(passed_on(watched.ring, ids, request(2, text="b"))) == 2
    assert watched.tokenizer.seen == [{KEYS[2]}]
    assert watched.roster.read().past == {name}


def test_a_suspect_that_is_refused_before_its_text_is_read_stays_one(demo: Tokenizer) -> None:
    """Otherwise a caller who fills the queue clears the text of which the tokenizer died."""
    fields: tuple[dict[str, Any], ...] = ({"text": "a"}, {"input_ids": pack_ids([5])}, {"text": LONG_TEXT})
    names = [named(number, **each) for number, each in enumerate(fields)]
    watched = Watched(demo, Suspects(watched=dict.fromkeys(names, 0)))
    ring = watched.ring
    ring.status = ProcessStatus(num_waiting=200)
    assert passed_on(ring, *(request(number, **each) for number, each in enumerate(fields))) == []
    assert {each.error.status for each in ring.refusals()} == {503}
    seen = watched.roster.read()
    assert (seen.present, seen.past, seen.has_served) == ({}, frozenset(), False)


def test_a_suspect_for_which_the_threads_have_no_room_stays_one(
    demo: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check_room(*_: object) -> None:
        raise Overloaded("texts wait")

    monkeypatch.setattr(LongTexts, "check_room", check_room)
    watched = Watched(demo, Suspects(watched={named(1, text=LONG_TEXT): 0}))
    assert refusal(watched.ring, request(1, text=LONG_TEXT)).error.status == 503
    assert not watched.roster.read().past


def test_a_request_that_is_refused_hides_none_of_the_same_name(demo: Tokenizer) -> None:
    """A caller over TCP may send its poison, and the same name again."""
    watched = Watched(demo)
    again = request(1, text="b", sampling=SamplingParams(temperature=1e9, seed=1))
    assert len(passed_on(watched.ring, request(1, text="a"), again, request(1, text=LONG_TEXT))) == 1
    assert watched.tokenizer.seen[0] == {KEYS[1]}
    watched.tokenizer.gate.set()
    watched.ring.finish()
    assert not keys_in(watched.roster)


def test_other_text_under_the_name_of_a_suspect_neither_clears_it_nor_is_taken_for_it(
    demo: Tokenizer,
) -> None:
    """A caller over TCP names its requests itself."""
    name = named(1, text="poison")
    watched = Watched(demo, Suspects(alone={name: ALWAYS_ALONE}, watched={name: 0}))
    assert len(passed_on(watched.ring, request(1, text="a"), request(2, text="b"))) == 2
    assert watched.tokenizer.seen == [{KEYS[1], KEYS[2]}]
    assert not watched.roster.read().past
    guilty = Watched(demo, Suspects(guilty=frozenset([name])))
    assert len(passed_on(guilty.ring, request(1, text="a"), request(1, text="poison"))) == 1
    assert [refused.error.code for refused in guilty.ring.refusals()] == ["quarantined"]
