"""A limit on CPU time: what ends by it, and what it leaves behind."""

from __future__ import annotations

import contextlib
import re
import signal
import time

import pytest

from runtime.checkpoint.adapters.cpu_limit import CpuLimit, TookTooLong

SLOW = re.compile("(a+)+b")


def test_a_search_and_a_loop_end() -> None:
    for work in (lambda: SLOW.fullmatch("a" * 27), lambda: sum(number for number in range(1 << 27))):
        for _ in range(3):
            began_s = time.thread_time()
            with pytest.raises(TookTooLong), CpuLimit(0.02):
                work()
            assert 0.02 <= time.thread_time() - began_s < 0.3


def test_it_leaves_nothing_behind() -> None:
    before = signal.getsignal(signal.SIGVTALRM)
    for limit_s in (10.0, 0.001):
        try:
            with CpuLimit(limit_s):
                SLOW.fullmatch("a" * 16)
        except TookTooLong:
            assert limit_s < 1.0
    assert signal.getsignal(signal.SIGVTALRM) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_work_that_swallows_the_error_is_stopped_again() -> None:
    """A finalizer is such work: Python only reports its errors."""
    num_swallowed = 0

    def swallow() -> None:
        nonlocal num_swallowed
        try:
            SLOW.fullmatch("a" * 24)
        except TookTooLong:
            num_swallowed += 1

    def work() -> None:
        for _ in range(3):
            swallow()
        SLOW.fullmatch("a" * 24)

    with pytest.raises(TookTooLong), CpuLimit(0.02):
        work()
    assert num_swallowed == 3


def test_the_error_comes_at_the_end_of_work_that_swallows_it() -> None:
    def swallow() -> None:
        with contextlib.suppress(TookTooLong):
            SLOW.fullmatch("a" * 24)

    with pytest.raises(TookTooLong), CpuLimit(0.02):
        swallow()


def test_another_error_passes() -> None:
    with pytest.raises(ValueError, match="mine"), CpuLimit(1.0):
        raise ValueError("mine")
