"""The loops of a ring together, in memory: callers abort, stop reading and leave at any moment."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from runtime.text.tokenizer import Tokenizer
from tests.harness.ring.memory_ring import MAX_ROWS, MAX_WAITING, MemoryRing

MAX_CALLERS = 4


@contextmanager
def ring_of(demo: Tokenizer, rng: random.Random, capacity: int) -> Iterator[MemoryRing]:
    ring = MemoryRing(demo, rng, capacity=capacity)
    try:
        yield ring
    finally:
        ring.close()


def act(ring: MemoryRing, rng: random.Random) -> None:
    """Actions of the callers between two turns."""
    if len(ring.callers) < MAX_CALLERS and rng.random() < 0.02:
        ring.connect()
    for caller in list(ring.callers.values()):
        chance = rng.random()
        if chance < 0.5:
            handle = ring.ask(caller)
            if handle is not None and rng.random() < 0.2:
                ring.abort(caller, handle)
        if chance < 0.4 and caller.live:
            ring.abort(caller, *rng.sample(sorted(caller.live), min(len(caller.live), rng.randrange(1, 4))))
        if chance > 0.995:
            ring.abort(caller)
        if rng.random() < 0.01:
            ring.peers.full ^= {caller.peer}
        if rng.random() < 0.002:
            ring.leave(caller)


@pytest.mark.parametrize("capacity", [2, 5, 1000])
def test_every_request_has_one_terminal_and_nothing_is_left_behind(demo: Tokenizer, capacity: int) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(3):
        rng = random.Random(seed)
        with ring_of(demo, rng, capacity) as ring:
            ring.connect()
            for _ in range(200):
                act(ring, rng)
                ring.turn()
            ring.peers.full.clear()
            ring.run_until_rest()
            ring.check()
            for caller in list(ring.callers.values()):
                ring.leave(caller)
            ring.now += 1.0  # the next ping finds nobody
            ring.run_until_rest()
            assert not ring.detokenizer._clients._by_id, f"seed {seed}: a client that left is still known"
            outcomes += ring.outcomes
    assert {"abort", "length", "stop"} <= set(outcomes), outcomes


def test_requests_of_a_caller_that_has_left_end_without_an_answer(demo: Tokenizer) -> None:
    with ring_of(demo, random.Random(0), 1000) as ring:
        for num_turns in range(12):
            caller = ring.connect()
            for _ in range(20):
                ring.ask(caller)
            for _ in range(num_turns):
                ring.turn()
            ring.leave(caller)
            ring.now += 1.0
            ring.run_until_rest()
            ring.check()


def test_admission_follows_the_load_and_not_the_clock(demo: Tokenizer) -> None:
    """Callers that keep as many requests in the ring as it holds are never refused, whatever the time."""
    with ring_of(demo, random.Random(0), 1000) as ring:
        caller = ring.connect()
        for _ in range(1000):
            while len(caller.live) < MAX_ROWS + MAX_WAITING:
                ring.ask(caller)
            ring.turn()
        ring.run_until_rest()
        assert ring.outcomes.total() == caller.num_asked > 1000
        assert ring.outcomes["overloaded"] == 0
        for _ in range(MAX_ROWS + MAX_WAITING + 5):
            ring.ask(caller)
        ring.run_until_rest()
        assert ring.outcomes["overloaded"] == 5
