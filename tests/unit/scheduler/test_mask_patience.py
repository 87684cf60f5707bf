"""How long steps wait for masks, by the clock that they are told."""

from __future__ import annotations

import pytest

from scheduler_proc.features.mask_patience import (
    LEAST_S,
    LOOK_S,
    MAX_COMPUTING_S,
    MAX_CREDIT_S,
    MAX_WAIT_S,
    SHARE,
    USUAL_S,
    MaskPatience,
)

NUM_MASKS = 8
USUAL = LEAST_S + NUM_MASKS * USUAL_S


class Step:
    """A step whose model is computed for so many seconds."""

    def __init__(
        self, patience: MaskPatience, began_s: float, computes_s: float, *, has_others: bool
    ) -> None:
        self.now_s = began_s
        self._patience = patience
        self._idle_from_s = began_s + computes_s
        patience.begin(began_s, NUM_MASKS, lambda: self.now_s >= self._idle_from_s, has_others=has_others)

    def wait(self, most_s: float) -> float:
        """Wait for masks that come after so many seconds; returns the time at which the step goes on."""
        due_s = self.now_s + most_s
        while (left_s := self._patience.left_s(self.now_s)) > 0.0 and self.now_s < due_s:
            self.now_s = min(due_s, self.now_s + left_s)
        self._patience.end(self.now_s)
        return self.now_s


def waited_s(patience: MaskPatience, began_s: float, most_s: float, computes_s: float = 0.0) -> float:
    return Step(patience, began_s, computes_s, has_others=True).wait(most_s) - began_s


def test_where_nobody_else_waits_there_is_the_most_patience() -> None:
    patience = MaskPatience()
    for began_s in (1.0, 2.0, 3.0):
        step = Step(patience, began_s, 0.0, has_others=False)
        assert step.wait(1.0) - began_s == pytest.approx(MAX_WAIT_S)


def test_others_wait_for_the_usual_time_and_a_share_beyond_it() -> None:
    patience = MaskPatience()
    now_s, total_s, num_steps = 1.0, 0.0, 50
    for _ in range(num_steps):
        took_s = waited_s(patience, now_s, 1.0)
        assert took_s >= USUAL
        total_s += took_s
        now_s += took_s + 0.005
    excess_s = total_s - num_steps * USUAL
    assert MAX_CREDIT_S < excess_s <= MAX_CREDIT_S + SHARE * (now_s - 1.0)
    assert waited_s(patience, now_s + 10.0, 1.0) == pytest.approx(USUAL + MAX_CREDIT_S)


def test_the_usual_time_costs_no_credit() -> None:
    patience = MaskPatience()
    for number in range(100):
        waited_s(patience, 1.0 + number * USUAL, USUAL)
    assert waited_s(patience, 1.0 + 100 * USUAL, 1.0) == pytest.approx(USUAL + MAX_CREDIT_S)


def test_time_in_which_the_worker_computes_is_not_counted() -> None:
    patience = MaskPatience()
    for number in range(100):
        assert waited_s(patience, 1.0 + number * 0.1, 0.099, computes_s=0.1) == pytest.approx(0.099)
    took_s = waited_s(patience, 11.0, 1.0, computes_s=0.1)
    assert took_s == pytest.approx(0.1 + USUAL + MAX_CREDIT_S, abs=2 * LOOK_S)


def test_a_worker_that_never_says_that_it_waits_is_not_waited_for_for_ever() -> None:
    patience = MaskPatience()
    most_s = MAX_COMPUTING_S + USUAL + MAX_CREDIT_S
    assert waited_s(patience, 1.0, 9.0, computes_s=9.0) == pytest.approx(most_s, abs=2 * LOOK_S)
