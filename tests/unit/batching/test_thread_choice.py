"""ThreadChoice: small steps are computed by the number of threads by which they follow each other soonest."""

from __future__ import annotations

import pytest

from model_worker.runner.recording.thread_choice import MAX_TOKENS, STAY, TRIAL, ThreadChoice, candidates


class Steps:
    """Stream of steps on a machine where each takes so many seconds by each number of threads."""

    def __init__(self, most: int, seconds: dict[int, float]) -> None:
        self.seconds = seconds
        self.now = 0.0
        self.choice = ThreadChoice(most, lambda: self.now)
        self.taken: list[int] = []

    def run(self, count: int, rows: bytes = b"row0", num_tokens: int = 1) -> None:
        for step in range(count):
            threads = self.choice.begin_step(rows, num_tokens)
            self.taken.append(threads)
            # Every fourth waits for its plan, and the one after it finds its own there.
            self.now += self.seconds[threads] * (3.0, 0.2, 0.4, 0.4)[step % 4]

    def share(self, threads: int) -> float:
        """Return by how much of the last steps they computed."""
        last = self.taken[-TRIAL * STAY :]
        return last.count(threads) / len(last)


def test_fewer_threads_compute_where_steps_follow_each_other_sooner() -> None:
    steps = Steps(2, {2: 4.4e-3, 1: 3.5e-3})
    steps.run(2 * TRIAL * STAY)
    assert steps.taken[0] == 2
    assert steps.share(1) > 0.9
    steps.seconds[2] = 2e-3  # what took a thread from it has ended
    steps.run(4 * TRIAL * STAY)
    assert steps.share(2) > 0.9


def test_all_threads_compute_where_fewer_gain_nothing_to_speak_of() -> None:
    steps = Steps(4, {4: 1e-3, 3: 0.99e-3, 2: 1.2e-3})
    steps.run(2 * TRIAL * STAY)
    assert steps.share(4) > 0.9
    assert set(steps.taken) == {4, 3, 2}


def test_pauses_between_requests_are_nobodys() -> None:
    steps = Steps(2, {2: 1e-3, 1: 1.5e-3})
    for request in range(TRIAL * STAY // 4):
        steps.run(9, rows=request.to_bytes(4, "little"))
        steps.now += 10.0
    assert steps.share(2) > 0.9


def test_large_steps_have_all_threads_and_each_size_its_own_number() -> None:
    steps = Steps(2, {2: 4e-3, 1: 2e-3})
    steps.run(2 * TRIAL * STAY)
    assert [steps.choice.begin_step(b"row0", MAX_TOKENS + 1) for _ in range(3 * TRIAL)] == [2] * 3 * TRIAL
    assert steps.choice.begin_step(b"row0row1", 2) == 2
    assert steps.choice.begin_step(b"row0", 1) == 1


@pytest.mark.parametrize(("most", "numbers"), [(1, [1]), (2, [2, 1]), (3, [3, 2, 1]), (16, [16, 15, 8])])
def test_all_one_fewer_and_half_of_the_threads_are_tried(most: int, numbers: list[int]) -> None:
    steps = Steps(most, dict.fromkeys(range(1, 17), 1e-3))
    steps.run(5 * TRIAL)
    assert sorted(set(steps.taken), reverse=True) == numbers
    assert most == 1 or candidates(most) == numbers
