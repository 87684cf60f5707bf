"""How many guesses a row makes: by how often they are right, and by what they cost."""

from __future__ import annotations

import random

import pytest

from scheduler_proc.features.speculation.draft_length import (
    FIRST_DRAFTS,
    LONGEST_PAUSE,
    LOWEST_BAR,
    SHORTEST_PAUSE,
    DraftLength,
)
from scheduler_proc.features.speculation.step_cost import (
    MOST_PROBE_AFTER,
    NUM_MEASURED,
    PLAIN_EVERY,
    PROBE_AFTER,
    StepCost,
    line_through,
)


def drive(rate: float, num_steps: int, most: int = 4, bar: float = 0.1) -> tuple[int, int, int]:
    """(guesses, of these right, steps with some) of a row whose guesses are right so often."""
    rng, length = random.Random(1), DraftLength()
    num_drafted = num_right = num_guessing = 0
    for _ in range(num_steps):
        count = length.num_drafts(most, bar)
        if not count:
            length.note_without()
            continue
        right = 0
        while right < count and rng.random() < rate:
            right += 1
        length.note_verified(count, right)
        num_drafted += count
        num_right += right
        num_guessing += 1
    return num_drafted, num_right, num_guessing


def test_who_is_always_right_guesses_as_much_as_there_may_be() -> None:
    num_drafted, num_right, num_guessing = drive(1.0, 200)
    assert num_drafted == num_right >= 790
    assert num_guessing == 200


def test_who_is_never_right_hardly_guesses() -> None:
    num_drafted, num_right, _ = drive(0.0, 1000)
    assert num_right == 0
    assert num_drafted < 50


def test_who_is_seldom_right_guesses_less_where_guesses_are_dear() -> None:
    cheap, dear = drive(0.5, 400, bar=0.1)[0], drive(0.5, 400, bar=0.45)[0]
    assert dear < cheap / 2


def test_who_was_wrong_tries_again_after_pauses_that_grow_and_comes_back_when_right() -> None:
    length = DraftLength()
    while length.num_drafts(4, 0.1):
        length.note_verified(4, 0)
    pauses = []
    for _ in range(7):
        pause = 0
        while not length.num_drafts(4, 0.1):
            length.note_without()
            pause += 1
        assert length.num_drafts(4, 0.1) == 1
        length.note_verified(1, 0)
        pauses.append(pause)
    assert pauses == sorted(pauses)
    assert pauses[0] <= SHORTEST_PAUSE
    assert pauses[-1] == LONGEST_PAUSE
    for _ in range(LONGEST_PAUSE):
        length.note_without()
    for _ in range(10):
        length.note_verified(1, 1)
    assert length.num_drafts(4, 0.1) == 4


@pytest.mark.parametrize("most", [0, 1])
def test_never_more_than_may_be(most: int) -> None:
    assert drive(1.0, 50, most=most)[0] == 50 * most


class Machine:
    """A step of so many seconds for itself, for each row and for each guess."""

    def __init__(self, fixed: float, per_token: float) -> None:
        self.fixed, self.per_token = fixed, per_token
        self.cost = StepCost()
        self.seconds = 0.0

    def run(self, num_rows: int, num_steps: int, rate: float, num_draft_tokens: int = 4) -> float:
        """Tokens a second of rows that all guess."""
        rng = random.Random(2)
        self.cost.num_guessing = num_rows
        lengths = [DraftLength(self.cost.rate) for _ in range(num_rows)]
        num_tokens, began = 0, self.seconds
        for _ in range(num_steps):
            cost = self.cost
            most = min(num_draft_tokens, cost.most)
            counts = [each.num_drafts(most, cost.bar, cost.least) for each in lengths]
            for length, count in zip(lengths, counts, strict=True):
                right = 0
                while right < count and rng.random() < rate:
                    right += 1
                num_tokens += right + 1
                if count:
                    length.note_verified(count, right)
                    cost.note_verified(count, right)
                else:
                    length.note_without()
            self.step(num_rows, sum(counts))
        return num_tokens / (self.seconds - began)

    def step(self, num_rows: int, num_guesses: int) -> float:
        seconds = self.fixed + self.per_token * (num_rows + num_guesses)
        self.seconds += seconds
        self.cost.note_step(num_rows, num_guesses, seconds)
        return seconds

    def plain(self, num_rows: int) -> float:
        return num_rows / (self.fixed + self.per_token * num_rows)


# 15.6 ms for one token and 21 ms for eight: a model of half a billion weights on two cores.
CPU = (0.0148, 0.00077)
COMPUTE_BOUND = (0.0, 0.001)


@pytest.mark.parametrize(
    ("machine", "num_rows", "rate", "least"),
    [
        (CPU, 1, 1.0, 2.0),
        (CPU, 8, 1.0, 1.3),
        (CPU, 1, 0.0, 0.95),
        (CPU, 8, 0.0, 0.95),
        (CPU, 64, 1.0, 0.98),
        (CPU, 64, 0.5, 0.98),
        (CPU, 64, 0.0, 0.98),
        (COMPUTE_BOUND, 64, 1.0, 0.98),
        (COMPUTE_BOUND, 8, 0.5, 0.95),
    ],
)
def test_guessing_gains_where_it_can_and_loses_little_elsewhere(
    machine: tuple[float, float], num_rows: int, rate: float, least: float
) -> None:
    model = Machine(*machine)
    assert model.run(num_rows, 600, rate) >= least * model.plain(num_rows)


@pytest.mark.parametrize("share", [0.5, 0.6, 0.77])
def test_requests_that_are_never_right_cost_little_where_guesses_are_dear(share: float) -> None:
    """64 begin at a time, once the cost is known; a guess of each makes a step longer by this share."""
    model = Machine(1.0 - share, share / 64)
    model.run(64, 64, 0.0)
    for _ in range(6):
        assert model.run(64, 64, 0.0) >= 0.98 * model.plain(64)


def test_a_try_waits_longer_by_as_much_as_it_costs() -> None:
    for bar in (0.1, 0.4, 0.9):
        length, num_steps = DraftLength(0.0), 0
        while not length.num_drafts(4, bar):
            length.note_without()
            num_steps += 1
        assert num_steps == pytest.approx(SHORTEST_PAUSE * bar / LOWEST_BAR, abs=1)


def test_who_does_not_guess_waits_a_quarter_longer_at_most() -> None:
    """Three rows beside five that are always right, once the cost is known."""
    model = Machine(*CPU)
    model.cost.num_guessing = 5
    plain = model.fixed + 8 * model.per_token
    taken = []
    for _ in range(300):
        most = min(4, model.cost.most)
        taken.append(model.step(8, 5 * most))
    assert max(taken[50:]) <= 1.25 * plain
    assert max(taken[50:]) > 1.1 * plain


def test_new_requests_begin_with_what_others_have_seen() -> None:
    cost = StepCost()
    for _ in range(200):
        cost.note_verified(4, 0)
    assert DraftLength(cost.rate).num_drafts(4, 0.1) == 0
    for _ in range(200):
        cost.note_verified(4, 4)
    length = DraftLength(cost.rate)
    assert length.num_drafts(4, 0.1) == FIRST_DRAFTS
    length.note_verified(FIRST_DRAFTS, FIRST_DRAFTS)
    assert length.num_drafts(4, 0.1) == 4


def test_who_is_never_right_soon_stops_whatever_others_were_like() -> None:
    length, num_drafted = DraftLength(1.0), 0
    while count := length.num_drafts(4, 0.4):
        length.note_verified(count, 0)
        num_drafted += count
    assert num_drafted <= 5


def test_what_a_step_with_guesses_costs_whatever_their_number_is_shared_by_several() -> None:
    """Such as that it is not planned ahead: one guess would never be worth it."""
    cost = StepCost()
    cost.num_guessing = 1
    for _ in range(NUM_MEASURED):
        cost.note_step(1, 0, 0.7e-3)
    length = DraftLength()
    for _ in range(20):
        count = length.num_drafts(min(4, cost.most), cost.bar, cost.least)
        assert count
        cost.note_step(1, count, 1.2e-3 + count * 0.02e-3)
        length.note_verified(count, count)
    assert count == 4


def test_fewer_guesses_are_likely_than_what_any_cost_makes_none() -> None:
    """Guesses that make a step as long as two are worth it where more than one of them will be right."""
    cost = StepCost()
    cost.num_guessing = 1
    for _ in range(NUM_MEASURED):
        cost.note_step(1, 0, 1.0)
    for count in (1, 4, 2):
        cost.note_step(1, count, 2.0 + 0.01 * count)
    often, seldom = DraftLength(0.9), DraftLength(0.5)
    for length in (often, seldom):
        length.note_verified(1, 1)
        length.rate = 0.9 if length is often else 0.5
    assert often.num_drafts(4, cost.bar, cost.least) == 4
    assert seldom.num_drafts(4, cost.bar, cost.least) == 0


def test_a_line_is_not_moved_by_a_point_far_away() -> None:
    points = [(n, 0.5 + 0.1 * n) for n in (1, 4, 4, 2, 3, 4)]
    at_zero, slope = line_through([*points, (4, 50.0)])
    assert at_zero == pytest.approx(0.5, abs=0.1)
    assert slope == pytest.approx(0.1, abs=0.05)
    assert line_through([(4, 2.0), (4, 2.4), (4, 2.8)]) == pytest.approx((0.0, 0.6))
    assert line_through([(64, 64.0), (256, 320.0), (64, 64.0)]) == pytest.approx((0.0, 1.0))


def test_a_step_as_long_as_its_tokens_number_has_no_guesses_however_its_times_vary() -> None:
    rng, cost = random.Random(1), StepCost()
    cost.num_guessing = 64
    for count in [0, 0, 0, *rng.choices([64, 128, 256], k=6)]:
        cost.note_step(64, count, (64 + count) * rng.uniform(0.95, 1.05))
    for _ in range(PROBE_AFTER - 1):
        cost.note_step(64, 0, 64 * rng.uniform(0.95, 1.05))
        assert cost.bar >= 1.0


def test_who_may_not_guess_for_the_sake_of_others_is_tried_again() -> None:
    """No row tries by itself then, since none may: five guess beside three."""
    cost = StepCost()
    cost.num_guessing = 5
    for count in [0] * NUM_MEASURED + [5] * NUM_MEASURED:
        cost.note_step(8, count, 1.0 + 0.08 * count)
    assert cost.bar < 1.0
    assert cost.most == 0
    for _ in range(PROBE_AFTER):
        assert cost.most == 0
        cost.note_step(8, 0, 1.0)
    assert cost.most == 1


def test_one_step_that_is_held_up_keeps_nobody_from_guessing() -> None:
    cost = StepCost()
    for _ in range(NUM_MEASURED):
        cost.note_step(1, 0, 0.01)
    cost.note_step(1, 1, 0.1)
    for _ in range(NUM_MEASURED):
        assert cost.most > 0
        assert cost.bar < 0.5
        cost.note_step(1, 1, 0.011)
    assert cost.most > 1


def test_costs_are_measured_again_in_both_directions() -> None:
    cost = StepCost()
    for _ in range(NUM_MEASURED):
        assert cost.most == 0
        cost.note_step(4, 0, 0.01)
    for _ in range(PLAIN_EVERY):
        assert cost.most > 0
        cost.note_step(4, 4, 0.011)
    assert cost.most == 0
    cost.note_step(4, 0, 0.01)
    assert cost.most > 0
    cost.num_guessing = 1
    for _ in range(9):
        cost.note_step(4, 4, 1.0)
    assert cost.most == 0
    for _ in range(PROBE_AFTER):
        cost.note_step(4, 0, 0.01)
    assert cost.most == 1


@pytest.mark.parametrize("is_busy", [True, False])
def test_what_was_dear_is_tried_again_and_forgotten_if_it_is_not(is_busy: bool) -> None:
    cost = StepCost()
    cost.num_guessing = 8
    for count in [0] * NUM_MEASURED + [16] * NUM_MEASURED:
        cost.note_step(8, count, 1.0 + 0.125 * count)
    assert cost.bar >= 1.0
    num_tried = num_steps = 0
    while num_steps < 4 * MOST_PROBE_AFTER and cost.bar >= 1.0:
        cost.note_step(8, 0, 1.0)
        num_steps += 1
        if cost.bar < 1.0:  # a trial
            num_tried += 1
            cost.note_step(8, 16, 3.0 if is_busy else 1.4)
    if is_busy:  # after ever longer pauses
        assert 7 <= num_tried <= 10
    else:
        assert num_steps == PROBE_AFTER
        for _ in range(NUM_MEASURED):
            cost.note_step(8, 16, 1.4)
        assert cost.bar < 0.5
        assert cost.most >= 4
