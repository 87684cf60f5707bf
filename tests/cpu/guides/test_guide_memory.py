"""Memory of guides that are followed: bounded for all together, shared by tenants; outputs stay the same."""

from __future__ import annotations

import gc
import json
import math
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from grammar_proc import compile_child, loop
from grammar_proc.compile_child import try_guide
from grammar_proc.guides import followed_guides, guide_memory
from grammar_proc.guides.followed_guides import MAX_HELD_S
from grammar_proc.guides.guide_memory import GuideCopy, HeapMeter, allocated_bytes, largest
from grammar_proc.guides.ready_guides import GuideMaker, ToMake
from grammar_proc.vocabulary import GrammarVocabulary
from runtime.settings.config import DEMO_MODEL
from runtime.wire.guide import Guide
from tests.harness.guides.grammar_ring import Followed, GrammarRing

POOL_BYTES = 16 << 20
MASK_BYTES = 4 << 20


NAMES = [f"field_{number}" for number in range(300)]
MANY_FIELDS = Guide(
    "json_schema",
    json.dumps(
        {"type": "object", "properties": {name: {"type": "string"} for name in NAMES}, "required": NAMES}
    ),
)
"""Takes 0.7 MiB from its start."""


def large(number: int) -> Guide:
    """Guide whose copy grows with each token, to some megabytes within 60."""
    return Guide("regex", f"(.*[a-m].{{9}}|.*{number}.{{31}}|.*c.{{16}}){{2}}.{{500}}")


@pytest.fixture(scope="module")
def vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary(DEMO_MODEL, num_threads=2)


def limit(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(guide_memory, "POOL_BYTES", num_bytes)
    monkeypatch.setattr(guide_memory, "MASK_BYTES", MASK_BYTES)
    monkeypatch.setattr(followed_guides, "POOL_BYTES", num_bytes)
    monkeypatch.setattr(followed_guides, "REBUILD_BYTES", 1 << 20)
    monkeypatch.setattr(followed_guides, "RESUME_BYTES", num_bytes * 3 // 4)


@pytest.fixture(autouse=True)
def nothing_left_to_free() -> None:
    """Free the guides of earlier tests: freed later, they would hide what those of this test take."""
    gc.collect()


@pytest.fixture
def small_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, POOL_BYTES)


def follow(ring: GrammarRing) -> int:
    """Follow all sequences to their ends. Returns the bytes that were allocated at most."""
    most = before = allocated_bytes()
    while not all(each.is_over for each in ring.sequences.values()):
        ring.turn()
        most = max(most, allocated_bytes())
    ring.turn()
    return most - before


def ends(found: list[Followed]) -> list[Any]:
    return [(each.ids, each.error) for each in found]


def test_guides_that_grow_take_no_more_than_there_is_and_outputs_are_the_same(
    vocabulary: GrammarVocabulary, small_pool: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is compiled anew when it has become the largest, and some wait meanwhile."""
    ring = GrammarRing(vocabulary)
    found = [ring.open(number.to_bytes(16), large(number), 50, number) for number in range(10)]
    assert follow(ring) < POOL_BYTES + 2 * MASK_BYTES  # it was 73 MiB
    monkeypatch.undo()
    roomy = GrammarRing(vocabulary)
    expected = [roomy.open(number.to_bytes(16), large(number), 50, number) for number in range(10)]
    assert follow(roomy) > 2 * POOL_BYTES
    assert ends(found) == ends(expected)
    assert [(len(each.ids), each.error) for each in found] == [(50, None)] * 10


def test_a_tenant_whose_guides_grow_disturbs_those_of_no_other(
    vocabulary: GrammarVocabulary, small_pool: None
) -> None:
    ring = GrammarRing(vocabulary)
    matchers = ring.loop._matchers
    bob = ring.open(b"bob", Guide("regex", "[a-z ]{4000}"), 400, tenant="bob")
    for number in range(8):
        ring.open(number.to_bytes(16), large(number), 50, number, "alice")
    copies = dict[GuideCopy | None, None]()
    while not bob.is_over:
        ring.turn()
        if bob.ids and not bob.is_over:
            copies[matchers.copy_of(b"bob")] = None
    follow(ring)
    assert (len(copies), None in copies) == (1, False), "its guide stays as it is"
    assert (len(bob.ids), bob.error) == (400, None)


def test_no_more_guides_are_compiled_anew_than_have_to_be(
    vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory was read while the first one was still held, so the next one had to give way, too. If that
    was the last, its sequence was ended. Bob's guide has a few states only, and the memory is read after
    each piece of work, so that nothing of hers is laid to his: hers is always the largest.
    """
    limit(monkeypatch, 3 << 20)
    monkeypatch.setattr(guide_memory, "LONG_READING_S", math.inf)
    ring = GrammarRing(vocabulary)
    bob = ring.open(b"bob", Guide("regex", "[a-z ]+"), 400, tenant="bob")
    alice = ring.open(b"alice", large(0), 80, tenant="alice")
    shrunk: list[str] = []

    def note(copies: list[GuideCopy]) -> GuideCopy:
        shrunk.append(largest(copies).tenant)
        return largest(copies)

    monkeypatch.setattr(followed_guides, "largest", note)
    ring.run()
    assert set(shrunk) == {"alice"}
    assert (len(bob.ids), bob.error) == (400, None)
    assert (len(alice.ids), alice.error) == (80, None)


class Counted:
    """Loop in which each guide that is followed takes a MiB, and for which there are `most`."""

    def __init__(self, vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
        limit(monkeypatch, most << 20)
        monkeypatch.setattr(guide_memory, "LONG_READING_S", math.inf)
        monkeypatch.setattr(loop, "HeapMeter", lambda: HeapMeter(self._read))
        self.ring: GrammarRing | None = None
        self.most = 0
        self.ring = GrammarRing(vocabulary)

    def _read(self) -> int:
        return 0 if self.ring is None else len(self.ring.loop._matchers.copies()) << 20

    def open(self, name: str, tenant: str, most: int) -> Followed:
        assert self.ring is not None
        guide = Guide("regex", f"{name}[a-z ]+")
        return self.ring.open(name.encode(), guide, most, len(self.ring.sequences), tenant)

    def run(self) -> None:
        """Follow all sequences, once each has a guide or waits for memory."""
        assert self.ring is not None
        guides = self.ring.loop._guides
        self.ring.loop.turn()
        while guides._waits:
            self.ring.loop.turn()
            time.sleep(0.0005)
        while not all(each.is_over for each in self.ring.sequences.values()):
            self.most = max(self.most, len(self.ring.loop._matchers.copies()))
            self.ring.turn()


def test_sequences_whose_guides_do_not_fit_wait_until_others_have_ended(
    vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(vocabulary, monkeypatch, 4)
    bob = counted.open("bob", "bob", 100)
    found = [counted.open(f"alice{number}", "alice", 100) for number in range(10)]
    counted.run()
    assert counted.most == 4
    assert [(len(each.ids), each.error) for each in (bob, *found)] == [(100, None)] * 11
    alone = Counted(vocabulary, monkeypatch, 400)
    for number in range(11):
        alone.open(f"alice{number - 1}" if number else "bob", "alice", 100)
    alone.run()
    assert alone.most == 11
    assert alone.ring is not None
    assert ends(list(alone.ring.sequences.values())) == ends([bob, *found])


def test_sequences_that_wait_for_memory_for_too_long_are_told_so(
    vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed_guides, "MAX_HELD_S", 0.0)
    counted = Counted(vocabulary, monkeypatch, 4)
    bob = counted.open("bob", "bob", 300)
    found = [counted.open(f"alice{number}", "alice", 300) for number in range(8)]
    counted.run()
    errors = [each.error for each in found if each.error is not None]
    assert len(errors) == 5
    assert {(error.status, error.code, error.retry_after_s) for error in errors} == {
        (503, "too_many_guides", followed_guides.RETRY_AFTER_S)
    }
    assert (len(bob.ids), bob.error) == (300, None)


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_sequence_that_waits_for_memory_again_without_a_token_goes_on_waiting(
    vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    """Before, its time began anew each time, so it could wait for ever."""
    now_s = 0.0
    monkeypatch.setattr(followed_guides, "time", SimpleNamespace(monotonic=lambda: now_s))
    ring = GrammarRing(vocabulary)
    one = ring.open(b"one", Guide("regex", "[a-z ]{4000}"), 100)
    while len(one.ids) < 10:
        ring.turn()
    ring.loop.turn()  # it is told the last token
    guides, matchers = ring.loop._guides, ring.loop._matchers
    for _ in range(3):
        copy = matchers.copy_of(b"one")
        assert copy is not None
        guides._hold(copy, [b"one"])
        now_s += 0.4 * MAX_HELD_S
        turn = ring.turn if goes_on else ring.loop.turn
        num_tokens, deadline = len(one.ids), time.monotonic() + 60.0
        while matchers.is_waiting(b"one") or (goes_on and len(one.ids) == num_tokens):
            turn()
            assert time.monotonic() < deadline
    ring.run()
    code = None if one.error is None else one.error.code
    assert (code, len(one.ids) == 100) == ((None, True) if goes_on else ("too_many_guides", False))


def test_a_guide_that_takes_more_than_there_is_ends_its_sequence(
    vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(vocabulary, monkeypatch, 0)
    one = counted.open("one", "alice", 100)
    counted.run()
    assert one.error is not None
    assert (one.error.status, one.error.code) == (400, "guide_too_complex")
    assert "more memory than there is" in one.error.message


def test_a_guide_that_is_large_once_compiled_is_refused(
    vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 1 << 18 < try_guide(MANY_FIELDS, vocabulary).num_bytes < 1 << 21
    monkeypatch.setattr(compile_child, "MAX_GUIDE_BYTES", 1 << 18)
    error = try_guide(MANY_FIELDS, vocabulary).error
    assert error is not None
    assert (error.status, error.code) == (400, "guide_too_large")


def test_memory_is_laid_to_the_guides_that_were_worked_on() -> None:
    size = 100
    meter = HeapMeter(lambda: size)
    start: Any = None
    first, second = GuideCopy(start, tenant="alice"), GuideCopy(start, tenant="bob")
    first.num_served = second.num_served = 1
    meter.touch((first, second))
    size = 160
    meter.read(now=True)
    assert (meter.num_bytes, first.num_bytes, second.num_bytes) == (60, 30, 30)
    assert first.num_fresh_bytes == 30
    first.num_masks = 2
    meter.expect(b"compiled meanwhile", 50)
    meter.touch((first,))
    size = 220
    meter.read(now=True)
    assert (first.num_bytes, first.num_fresh_bytes, second.num_bytes) == (40, 30, 30)
    meter.is_there(b"compiled meanwhile")
    meter.touch((second,))
    size = 200
    meter.read(now=True)
    assert (meter.num_bytes, second.num_bytes) == (100, 30), "what was freed was that of others"
    third = GuideCopy(start, tenant="bob", num_bytes=15)
    assert largest([first, second, third]) is second


def test_tenants_take_turns_at_having_guides_compiled() -> None:
    order: list[str] = []
    goes_on = threading.Event()

    def compile_grammar(grammar: str, anew: bool) -> Any:
        goes_on.wait(30.0)
        order.append(grammar)

    maker = GuideMaker(compile_grammar, HeapMeter())
    for number in range(4):
        maker.make(b"a%d" % number, ToMake(f"a{number}", "alice", 0))
    maker.make(b"b", ToMake("b", "bob", 0))
    maker.make(b"left", ToMake("left", "alice", 0))
    maker.cancel(b"left")
    goes_on.set()
    deadline = time.monotonic() + 30.0
    made: dict[bytes, GuideCopy] = {}
    while len(made) < 5:
        assert time.monotonic() < deadline
        made.update(maker.done())
    assert order == ["a0", "b", "a1", "a2", "a3"]
    assert (made[b"b"].grammar, made[b"b"].tenant) == ("b", "bob")
    assert b"left" not in maker
    maker.close()
