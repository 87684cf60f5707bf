"""Tables of cases that are one test: an item of pytest costs as much as a dozen of most cases."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

Test = Callable[..., None]


def for_each(names: str | Sequence[str], rows: Iterable[Any]) -> Callable[[Test], Test]:
    """Run a test with each row, as pytest.mark.parametrize does but as one test: for many cases that take
    next to nothing and leave nothing behind, as they have their fixtures in common. All rows are tried; each
    that fails is shown with its values. Raises ValueError if there is no row.
    """
    is_one = isinstance(names, str)
    arguments = [names] if isinstance(names, str) else list(names)
    cases = [dict(zip(arguments, [row] if is_one else row, strict=True)) for row in rows]
    if not cases:
        raise ValueError(f"for_each: a table of {', '.join(arguments)} without a row tests nothing")

    def with_each_row(test: Test) -> Test:
        @functools.wraps(test)
        def test_of_all(**fixtures: Any) -> None:
            failures: list[BaseException] = []
            for case in cases:
                try:
                    test(**fixtures, **case)
                except (Exception, pytest.fail.Exception) as failure:
                    failure.add_note(f"with {_shown(case)}")
                    failures.append(failure)
            if len(failures) == 1:
                raise failures[0]
            if failures:
                raise BaseExceptionGroup(f"{len(failures)} of {len(cases)} cases", failures)

        whole = inspect.signature(test)
        fixtures = [parameter for name, parameter in whole.parameters.items() if name not in arguments]
        vars(test_of_all)["__signature__"] = whole.replace(parameters=fixtures)
        return test_of_all

    return with_each_row


def _shown(case: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r:.300}" for name, value in case.items())
