"""Limit of open files at the start of a launch."""

from __future__ import annotations

import resource

import pytest

from runtime.base.errors import ConfigError
from runtime.launcher.checks.descriptors import MIN_DESCRIPTORS, check_descriptors

ENDLESS = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "becomes"),
    [
        ((16, 4096), (MIN_DESCRIPTORS, 4096)),
        ((16, ENDLESS), (MIN_DESCRIPTORS, ENDLESS)),
        ((1024, 4096), None),
        ((ENDLESS, ENDLESS), None),
    ],
)
def test_a_limit_that_may_be_raised_is(
    limits: tuple[int, int], becomes: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: made.append(both))
    check_descriptors()
    assert made == ([] if becomes is None else [becomes])


def test_a_limit_that_is_too_low_is_refused_before_zmq_aborts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch ended by SIGABRT with "Too many open files (src/epoll.cpp:38)"."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (16, 16))
    with pytest.raises(ConfigError, match=r"only 16 files may be open in a process \(ulimit -n\)"):
        check_descriptors()
