"""Tables of cases that are one test (harness/cases.py): no row is passed over, and no failure hides."""

from __future__ import annotations

import inspect

import pytest

from tests.harness.cases import for_each


def test_each_row_that_fails_is_shown_with_its_values() -> None:
    tried: list[int] = []

    @for_each(("left", "right"), [(1, 1), (2, 3), (4, 4), (5, 6)])
    def test(left: int, right: int) -> None:
        tried.append(left)
        if left == 5:
            pytest.fail("not raised by Python")
        assert left == right

    with pytest.raises(BaseExceptionGroup, match="2 of 4 cases") as caught:
        test()
    assert tried == [1, 2, 4, 5]
    assert [failure.__notes__ for failure in caught.value.exceptions] == [
        ["with left=2, right=3"],
        ["with left=5, right=6"],
    ]


def test_a_single_failure_is_raised_as_it_is() -> None:
    @for_each("value", [1, 2, 3])
    def test(value: int) -> None:
        assert value != 2, "two"

    with pytest.raises(AssertionError, match="two") as caught:
        test()
    assert caught.value.__notes__ == ["with value=2"]


def test_fixtures_are_what_no_row_gives() -> None:
    seen: list[tuple[int, str, str]] = []

    @for_each("number", [1, 2])
    @for_each("letter", ["a", "b"])
    def test(number: int, demo: str, letter: str) -> None:
        seen.append((number, demo, letter))

    assert list(inspect.signature(test).parameters) == ["demo"]
    test(demo="x")
    assert seen == [(1, "x", "a"), (1, "x", "b"), (2, "x", "a"), (2, "x", "b")]


def test_a_table_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="a, b without a row"):
        for_each(("a", "b"), [])
