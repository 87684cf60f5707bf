"""ThreadChoice: small steps have the limit of threads by which they follow each other soonest."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from model_worker.runner.recording.thread_choice import LOOK, MAX_TOKENS, TRIAL, Limit, ThreadChoice, limits
from tests.harness.cases import for_each

ALL = Limit(2, 0.0)
MANY = 32 * TRIAL
"""Steps enough for each limit to have had its turn."""
WAITING = (3.0, 0.2, 0.4, 0.4)
"""Every fourth step waits for its plan, and the ones after it find theirs there."""


class Steps:
    """Stream of steps on a machine where each takes so many seconds with each limit."""

    def __init__(
        self, most: int, seconds: Callable[[Limit], float], factors: tuple[float, ...] = WAITING
    ) -> None:
        self.seconds, self.factors = seconds, factors
        self.now = 0.0
        self.choice = ThreadChoice(most, lambda: self.now)
        self.taken: list[Limit] = []

    def run(self, count: int, rows: bytes = b"row0", num_tokens: int = 1) -> None:
        for step in range(count):
            limit = self.choice.begin_step(rows, num_tokens)
            self.taken.append(limit)
            self.now += self.seconds(limit) * self.factors[step % len(self.factors)]

    def share(self, limit: Limit) -> float:
        """Return with how much of the last steps it was."""
        last = self.taken[-MANY:]
        return last.count(limit) / len(last)


@pytest.mark.parametrize("best", [0.25, 0.5, 1.0])
def test_a_thread_less_computes_as_much_of_a_step_as_is_fastest(best: float) -> None:
    steps = Steps(2, lambda limit: 3e-3 + 2e-3 * abs(limit.share - best))
    steps.run(2 * MANY)
    assert steps.taken[0] == ALL
    assert steps.share(Limit(1, best)) > 0.8
    steps.seconds = lambda limit: 2e-3 + 1e-3 * limit.share  # what took a thread from it has ended
    steps.run(12 * MANY)
    assert steps.share(ALL) > 0.8


def test_all_threads_compute_where_fewer_gain_nothing_to_speak_of() -> None:
    steps = Steps(4, lambda limit: 0.99e-3 if limit.share else 1e-3)
    steps.run(8 * MANY)
    assert steps.share(Limit(4, 0.0)) == max(map(steps.share, limits(4)))
    assert set(steps.taken) == set(limits(4))


def test_a_limit_that_is_clearly_slower_is_tried_for_a_few_steps_only() -> None:
    steps = Steps(2, lambda limit: 20e-3 * (1 + 0.7 * limit.share), factors=(1.0,))
    steps.run(TRIAL + 4 * LOOK + 1)
    assert [steps.taken.count(limit) for limit in limits(2)] == [TRIAL + 1] + [LOOK] * 4


def test_pauses_between_requests_are_nobodys() -> None:
    steps = Steps(2, lambda limit: 1e-3 + 1e-3 * limit.share)
    for request in range(MANY // 2):
        steps.run(9, rows=request.to_bytes(4, "little"))
        steps.now += 10.0
    assert steps.share(ALL) > 0.9


def test_large_steps_have_all_threads_and_each_size_its_own_limit() -> None:
    steps = Steps(2, lambda limit: 4e-3 - 2e-3 * limit.share)
    steps.run(2 * MANY)
    assert [steps.choice.begin_step(b"row0", MAX_TOKENS + 1) for _ in range(3 * TRIAL)] == [ALL] * 3 * TRIAL
    assert steps.choice.begin_step(b"row0row1", 2) == ALL
    assert steps.choice.begin_step(b"row0", 1) == Limit(1, 1.0)


@for_each(("most", "fewer"), [(1, []), (2, [1]), (3, [2]), (16, [15, 8])])
def test_one_thread_less_and_half_of_them_are_tried(most: int, fewer: list[int]) -> None:
    steps = Steps(most, lambda _: 1e-3)
    steps.run(len(limits(most)) * TRIAL + 1)
    assert set(steps.taken) == set(limits(most))
    assert sorted({limit.threads for limit in steps.taken if limit.share}, reverse=True) == fewer
