"""Grammar process for the real scheduler: late, full, dead, or refusing; its guides, and the tokens that they
allow.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from grammar_proc.branches import Branches
from runtime.base.mask_memory import MaskMemory
from runtime.wire.format import Message, unpack_ids
from runtime.wire.guide import Guide, MatcherState
from runtime.wire.hypotheses import BranchMatchers
from runtime.wire.messages import (
    AdvanceMatchers,
    CloseMatcher,
    ErrorInfo,
    ForgetMatchers,
    FromGrammar,
    GrammarStarted,
    GuideRefused,
    MatcherStates,
    OpenMatcher,
)
from scheduler_proc.features.grammar_client import GrammarClient
from scheduler_proc.features.mask_slots import MaskSlots
from tests.harness.guides.branched import branched
from tests.harness.simulation.fake_sampling import VOCAB_SIZE

MAX_DELAY_S = 0.4
NUM_SLOTS = 64
WIDTH = 4
"""Slots of a sequence: fewer than it may have guesses."""
SHORT = 0.02
"""Probability that it gives up at a guess."""
CLOSES_AT = 11
"""Output tokens with which the guide `short` is complete, and nothing may follow."""
GUIDES = ("short", "long", "open")
FORKING = "forking"
"""Guide that allows other tokens after each hypothesis. What the others allow is the same after any output of
a length that they allow.
"""
REFUSED = "refused"


def allowed_after(ids: list[int], *, forks: bool = False) -> list[int]:
    """A third of the vocabulary, by the output so far."""
    rest = sum((at + 1) * (token // 3 if forks else token) for at, token in enumerate(ids)) % 3
    return [token for token in range(1, VOCAB_SIZE) if token % 3 == rest]


class Place(NamedTuple):
    """Where an output stands in a guide."""

    allowed: list[int]
    is_complete: bool


def place_in(guide: str, ids: list[int]) -> Place:
    if guide == "short" and len(ids) >= CLOSES_AT:
        return Place([], is_complete=True)
    return Place(
        allowed_after(ids, forks=guide == FORKING), is_complete=guide == "open" and len(ids) % 3 == 2
    )


def mask_of(place: Place) -> bytes:
    """Empty where nothing may come."""
    bits = np.zeros(VOCAB_SIZE, np.uint8)
    bits[place.allowed] = 1
    return np.packbits(bits, bitorder="little").tobytes() if place.allowed else b""


def _is_of(answer: FromGrammar, handle: bytes, slot: int | None) -> bool:
    """Return True for an answer about a sequence whose first mask is in this slot."""
    if not isinstance(answer, MatcherStates):
        return False
    state = answer.states[0]
    return state.handle == handle and state.masks[0] == slot


class FakeGrammar:
    """The grammar process: holds its matchers alone, forgets them when it dies, answers when it likes."""

    def __init__(self, late: float, seed: int = 0, refusal: float = 0.0) -> None:
        """`refusal`: probability that it has no room for a message."""
        self.late = late
        """How many of its answers take up to MAX_DELAY_S."""
        self.pass_time: Callable[[float], None] = lambda _: None
        self.now_s: Callable[[], float] = lambda: 0.0
        self.refuse: Callable[[GuideRefused], object] = lambda _: None
        self.branches: Branches | None = None
        """The hypotheses of searches, if there are any."""
        self.start_of: Callable[[str], Any] = str
        """Gives the matcher that the hypotheses of a search in a guide begin with."""
        self.num_waits = 0
        self.num_late = 0
        self._refusal = refusal
        self._rng = random.Random(seed)
        self._guides: dict[bytes, str] = {}
        self._ids: dict[bytes, list[int]] = {}
        self._answers: list[tuple[float, FromGrammar]] = []
        self._slot_of: dict[bytes, int] = {}
        self._unwritten: dict[bytes, tuple[MatcherState, list[bytes]]] = {}
        self.num_behind_guesses = 0
        """Masks behind guesses."""
        self.is_dead = False

    @property
    def num_open(self) -> int:
        return len(self._ids)

    def client(self, clock: Callable[[], float], num_slots: int = NUM_SLOTS) -> GrammarClient:
        """`num_slots`: sequences with slots in the memory where masks lie, each for WIDTH masks; what is
        beyond comes in messages.
        """
        self.slots = MaskSlots(
            MaskMemory.create(NUM_SLOTS * WIDTH, -(-VOCAB_SIZE // 32) * 4), num_slots, WIDTH
        )
        made = self._client = GrammarClient(self.send, self.news, clock, self.slots)
        return made

    def catch_up(self) -> None:
        """Have sent what waits for room: without a guided request nobody asks for that."""
        self._refusal = 0.0
        self._client.take_news()

    def send(self, message: Message) -> bool:
        if self._refusal and self._rng.random() < self._refusal:
            return False
        if self.is_dead:
            return True  # into a socket that nobody reads
        if isinstance(message, OpenMatcher):
            self._slot_of.pop(message.handle, None)
            if message.memory:
                assert (message.memory, message.num_slots) == (self.slots.memory.name, WIDTH)
                self._slot_of[message.handle] = message.slot
            self._open(message.handle, message.guide, unpack_ids(message.output_ids).tolist())
        elif isinstance(message, AdvanceMatchers):
            for handle, num_tokens, packed, guesses in message.entries:
                ids = self._ids.get(handle)
                new = unpack_ids(packed).tolist()
                if ids is not None and len(ids) + len(new) == num_tokens:
                    ids += new
                    self._answer(handle, guesses)
        elif isinstance(message, BranchMatchers):
            self._branch(message)
        elif isinstance(message, CloseMatcher):
            self._ids.pop(message.handle, None)
            if self.branches is not None:
                self.branches.close(message.handle)
            self._unwritten.pop(message.handle, None)
        else:
            assert isinstance(message, ForgetMatchers)
        return True

    def _open(self, handle: bytes, guide: Guide, ids: list[int]) -> None:
        if guide.text == REFUSED:
            self.refuse(GuideRefused(handle, ErrorInfo("no", "invalid_guide", guide.kind, 400)))
            return
        self._guides[handle] = guide.text
        self._ids[handle] = ids
        # What is not told yet is told of the new matcher only. If it has the same slot, nobody could know.
        slot = self._slot_of.get(handle)
        self._answers = [each for each in self._answers if not _is_of(each[1], handle, slot)]
        self._answer(handle)

    def _branch(self, message: BranchMatchers) -> None:
        if message.handle not in self._ids:
            return
        assert self.branches is not None, "a search without a grammar process that knows branches"
        states = branched(self.branches, self.start_of(self._guides[message.handle]), message)
        if states is not None:
            self._answers.append((self.now_s() + self.delay_s(message.handle), states))

    def delay_s(self, handle: bytes) -> float:
        """Return how long the next answer about a sequence takes: here it is drawn, for all alike."""
        is_late = self._rng.random() < self.late
        self.num_late += is_late
        return self._rng.uniform(0.0, MAX_DELAY_S) if is_late else 0.0

    def _answer(self, handle: bytes, guesses: bytes = b"") -> None:
        places, is_short = self._places(handle, guesses)
        delay_s = self.delay_s(handle)
        self.num_behind_guesses += len(places) - 1
        is_late, due_s = delay_s > 0.0, self.now_s() + delay_s
        for earlier_s, earlier in self._answers:  # what was asked first is answered first
            if isinstance(earlier, MatcherStates) and earlier.states[0].handle == handle:
                due_s, is_late = max(due_s, earlier_s), True
        masks, slot = [mask_of(place) for place in places], self._slot_of.get(handle)
        kept: list[bytes | int] = list(masks)
        if slot is not None:
            kept[:WIDTH] = [slot + at if mask else mask for at, mask in enumerate(masks[:WIDTH])]
        are_complete = tuple(place.is_complete for place in places)
        state = MatcherState(handle, len(self._ids[handle]), tuple(kept), are_complete, guesses, is_short)
        if is_late:
            self._unwritten[handle] = (state, masks)
        else:
            self._write(state, masks)
        self._answers.append((due_s, MatcherStates((state,))))

    def _places(self, handle: bytes, guesses: bytes) -> tuple[list[Place], bool]:
        """Places before and behind guesses, as far as these may come. True where it has given up before."""
        ids, guide = list(self._ids[handle]), self._guides[handle]
        places = [place_in(guide, ids)]
        for guess in unpack_ids(guesses).tolist():
            if guess not in places[-1].allowed:
                break
            if self._rng.random() < SHORT:
                return places, True
            ids.append(guess)
            places.append(place_in(guide, ids))
        return places, False

    def _write_late(self, state: MatcherState) -> None:
        """Masks that are late are made when they are told; nothing is written for who has ended."""
        newest, masks = self._unwritten.get(state.handle, (None, []))
        if newest is state:
            del self._unwritten[state.handle]
            self._write(state, masks)

    def _write(self, state: MatcherState, masks: list[bytes]) -> None:
        slot = self._slot_of.get(state.handle)
        if slot is not None:
            for number, mask in enumerate(masks[:WIDTH]):
                self.slots.memory.write(slot + number, mask)

    def news(self, wait_s: float) -> list[FromGrammar]:
        if wait_s > 0.0:
            self.num_waits += 1
            if not self._is_due():
                self.pass_time(wait_s)
        due = self._is_due()
        self._answers = [each for each in self._answers if each not in due]
        for _, answer in due:
            if isinstance(answer, MatcherStates):
                self._write_late(answer.states[0])
        return [answer for _, answer in due]

    def _is_due(self) -> list[tuple[float, FromGrammar]]:
        return [each for each in self._answers if each[0] <= self.now_s() and not self.is_dead]

    def die(self) -> None:
        self.is_dead = True
        self._ids.clear()
        self._slot_of.clear()
        self._unwritten.clear()
        self._answers.clear()
        if self.branches is not None:
            self.branches.clear()

    def start(self) -> None:
        self.is_dead = False
        self._answers.append((self.now_s(), GrammarStarted()))
