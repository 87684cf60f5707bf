"""A tenant that floods the runtime evicts its own pages, and another one's hot prefix stays."""

from __future__ import annotations

import random

import pytest

from tests.harness.scheduler.scheduler_parts import message, running
from tests.harness.simulation.fake_sampling import VOCAB_SIZE
from tests.harness.simulation.sim_system import System

A, B = b"tenant-A", b"tenant-B" + b"salt"
PAGE_SIZE = 16
POOL = {"page_size": PAGE_SIZE, "num_pages": 12_000 // PAGE_SIZE, "max_len": 2048, "budget": 2048, "depth": 2}
HOT = 992
"""Tokens of A's prefix."""
NUM_FLOODED = (100, pytest.param(500, marks=pytest.mark.full))
NUM_WAITING = 8
"""Requests of B, at any time, beside those that run."""


class Flood:
    """B sends prompts that nobody has sent before; after every 20 of them A asks with its prefix again."""

    def __init__(
        self, system: System, num_flooded: int, lengths: tuple[int, int], outputs: tuple[int, int]
    ) -> None:
        self.system = system
        self.num_flooded = num_flooded
        self.rng = random.Random(5)
        self.lengths, self.outputs = lengths, outputs
        self.hot = self.draw(HOT)
        self.num_sent = 0
        self.asked: list[bytes] = []
        self.flooded: list[bytes] = []
        self.most_running = 0
        self.backlog = system.rows.max_rows + NUM_WAITING

    def draw(self, num_tokens: int) -> list[int]:
        return [self.rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)]

    def send(self, tokens: list[int], max_tokens: int, namespace: bytes) -> bytes:
        self.num_sent += 1
        sent = message(self.num_sent, tokens, max_tokens, namespace=namespace)
        assert self.system.inbox.send(sent)
        return sent.handle

    def ask(self) -> None:
        self.asked.append(self.send(self.hot + self.draw(20), 8, A))

    def run(self) -> None:
        closed = self.system.detokenizer.closed
        self.ask()
        for _ in range(100_000):
            num_done = sum(handle in closed for handle in self.flooded)
            while len(self.flooded) < min(self.num_flooded, num_done + self.backlog):
                tokens = self.draw(self.rng.randint(*self.lengths))
                self.flooded.append(self.send(tokens, self.rng.randint(*self.outputs), B))
            if all(handle in closed for handle in self.asked) and num_done >= 20 * len(self.asked):
                self.ask()
            self.system.step()
            self.most_running = max(self.most_running, self.system.rows.num_running)
            if num_done == self.num_flooded and self.system.scheduler.is_idle:
                return
        raise AssertionError("no progress")

    def hit_rate(self) -> float:
        """Share of the tokens of A's prefix that were found, in all its requests but the first."""
        found = [self.system.detokenizer.closed[handle].cached_tokens for handle in self.asked[1:]]
        return sum(found) / (HOT * len(found))


@pytest.mark.parametrize(
    ("max_rows", "lengths", "outputs"),
    [
        pytest.param(4, (900, 1100), (1, 40), id="prompts that go through quickly"),
        pytest.param(32, (400, 1500), (1, 200), id="as many rows as the pool holds"),
        pytest.param(32, (20, 60), (300, 600), id="short prompts and long outputs"),
    ],
)
@pytest.mark.parametrize("capacity", ["max_utilization", "guaranteed_no_evict"])
@pytest.mark.parametrize("num_flooded", NUM_FLOODED)
def test_a_flood_of_one_tenant_leaves_the_hot_prefix_of_another(
    num_flooded: int, capacity: str, max_rows: int, lengths: tuple[int, int], outputs: tuple[int, int]
) -> None:
    with running(capacity=capacity, max_rows=max_rows, **POOL) as system:
        flood = Flood(system, num_flooded, lengths, outputs)
        flood.run()
        assert flood.most_running >= min(max_rows, 6), "one after the other is no flood"
        assert len(flood.asked) >= num_flooded // 25
        assert flood.hit_rate() >= 0.8
