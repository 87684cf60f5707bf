"""How often and how soon what has died is started again."""

from __future__ import annotations

from runtime.base.errors import StartError
from runtime.launcher.deaths.restart_budget import BACK_OFF_S, RestartBudget


def spend(
    budget: RestartBudget,
    unit: str,
    limit: int,
    now: float,
    *,
    by_itself: bool = False,
    was_ready: bool = True,
) -> float | None:
    """Spend a restart, by default on a death from outside. None: there is none left."""
    try:
        return budget.spend(unit, limit, now, from_outside=not by_itself, was_ready=was_ready)
    except StartError:
        return None


def test_what_dies_by_itself_is_started_at_once_and_then_after_longer_and_longer() -> None:
    budget = RestartBudget(window_s=60.0)
    delays = [spend(budget, "api", 7, now, by_itself=True) for now in range(7)]
    assert delays == [*BACK_OFF_S, BACK_OFF_S[-1], BACK_OFF_S[-1]]
    assert BACK_OFF_S[0] == 0.0


def test_what_is_ended_from_outside_is_started_at_once_and_lengthens_no_pause() -> None:
    budget = RestartBudget(window_s=60.0)
    outside = (True, True, False, True, False)
    delays = [spend(budget, "api", 5, now, by_itself=not each) for now, each in enumerate(outside)]
    assert delays == [0.0, 0.0, BACK_OFF_S[0], 0.0, BACK_OFF_S[1]]
    assert spend(budget, "api", 5, 5.0) is None


def test_a_budget_is_spent_within_its_window_and_comes_back_after_it() -> None:
    budget = RestartBudget(window_s=60.0)
    assert [spend(budget, "engine", 2, now) is None for now in (0.0, 10.0, 59.0)] == [False, False, True]
    assert spend(budget, "engine", 2, 60.0) is not None
    assert spend(budget, "engine", 2, 60.5) is None
    assert spend(budget, "engine", 2, 200.0) == 0.0
    assert budget.counts == {"engine": 4}


def test_what_does_not_get_ready_is_not_started_for_ever_however_long_it_takes_to_fail() -> None:
    budget = RestartBudget(window_s=60.0)
    assert spend(budget, "engine", 3, 0.0) == 0.0
    loads = [
        spend(budget, "engine", 3, now, by_itself=True, was_ready=False) for now in (500.0, 1000.0, 1500.0)
    ]
    assert [delay is None for delay in loads] == [False, False, True]
    assert spend(budget, "engine", 3, 2000.0) == 0.0  # it has served meanwhile


def test_units_have_budgets_of_their_own() -> None:
    budget = RestartBudget(window_s=60.0)
    assert spend(budget, "tokenizer:0", 1, 0.0) == 0.0
    assert spend(budget, "tokenizer:0", 1, 1.0) is None
    assert spend(budget, "tokenizer:1", 1, 1.0) == 0.0


def test_a_budget_of_none_restarts_nothing() -> None:
    assert spend(RestartBudget(window_s=60.0), "engine", 0, 0.0) is None
