"""Properties of every request, whatever it asks and whatever happens to it: see
tests.harness.mutants.request_properties.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from runtime.text.tokenizer import Tokenizer
from tests.harness.mutants.request_properties import PropertyRing

MAX_CALLERS = 4
REQUESTS_PER_RING = 250


def act(ring: PropertyRing, rng: random.Random) -> None:
    """Actions of the callers between two turns."""
    if len(ring.callers) < MAX_CALLERS and rng.random() < 0.05:
        ring.connect()
    for caller in list(ring.callers.values()):
        if rng.random() < 0.15:
            asked = ring.ask_any(caller)
            if asked is not None and rng.random() < 0.1:
                ring.abort_request(asked)
        if rng.random() < 0.05 and caller.live:
            handle = rng.choice(sorted(caller.live))
            ring.abort_request(ring.request_of(handle))
        if rng.random() < 0.002:
            ring.leave(caller)


def run(demo: Tokenizer, seed: int, num_requests: int) -> Counter[str]:
    rng = random.Random(seed)
    ring = PropertyRing(demo, rng, capacity=rng.choice([3, 20, 1000]))
    try:
        ring.connect()
        while len(ring.asked) < num_requests:
            act(ring, rng)
            ring.turn()
        ring.run_until_rest()
        ring.check()
        ring.check_requests()
    finally:
        ring.close()
    return ring.outcomes


def test_each_of_500_random_requests_is_answered_as_it_must_be(demo: Tokenizer) -> None:
    outcomes = run(demo, 1, REQUESTS_PER_RING) + run(demo, 2, REQUESTS_PER_RING)
    # A test that never saw one of them would say little about it.
    assert min(outcomes[reason] for reason in ("stop", "length", "abort", "timeout")) > 0, outcomes


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(100, 180))
def test_each_of_20000_random_requests_is_answered_as_it_must_be(demo: Tokenizer, seed: int) -> None:
    run(demo, seed, REQUESTS_PER_RING)
