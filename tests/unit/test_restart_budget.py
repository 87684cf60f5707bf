"""How often and how soon what has died is started again."""

from __future__ import annotations

from runtime.restart_budget import BACK_OFF_S, RestartBudget


def test_the_first_restart_is_at_once_and_each_one_more_waits_longer() -> None:
    budget = RestartBudget(window_s=60.0)
    delays = [budget.spend("api", 6, now) for now in range(6)]
    assert delays == [*BACK_OFF_S, BACK_OFF_S[-1], BACK_OFF_S[-1]]
    assert BACK_OFF_S[0] == 0.0


def test_a_budget_is_spent_within_its_window_and_comes_back_after_it() -> None:
    budget = RestartBudget(window_s=60.0)
    assert [budget.spend("engine", 2, now) is None for now in (0.0, 10.0, 59.0)] == [False, False, True]
    assert budget.spend("engine", 2, 60.0) is not None
    assert budget.spend("engine", 2, 60.5) is None
    assert budget.spend("engine", 2, 200.0) == BACK_OFF_S[0]
    assert budget.counts == {"engine": 4}


def test_units_have_budgets_of_their_own() -> None:
    budget = RestartBudget(window_s=60.0)
    assert budget.spend("tokenizer:0", 1, 0.0) == 0.0
    assert budget.spend("tokenizer:0", 1, 1.0) is None
    assert budget.spend("tokenizer:1", 1, 1.0) == 0.0


def test_a_budget_of_none_restarts_nothing() -> None:
    assert RestartBudget(window_s=60.0).spend("engine", 0, 0.0) is None
