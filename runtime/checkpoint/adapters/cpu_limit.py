"""A limit on the CPU time of work that has no steps to be counted, such as a search with a pattern."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

LOOKS = 8
"""Number of times that the clock is looked at within the limit, if no other thread works."""


class TookTooLong(Exception):
    """The work has used all the CPU time that it may use."""


@contextmanager
def cpu_limit(limit_s: float) -> Iterator[None]:
    """Context in which TookTooLong is raised once this thread has used so many seconds of CPU. For the main
    thread only, since it uses a signal (SIGVTALRM).

    Python code and regular expressions end then. Other code in C is not interrupted, and the error comes
    after it.
    """
    end_s = time.thread_time() + limit_s
    is_over = False

    def look(*_: object) -> None:
        nonlocal is_over
        if not is_over and time.thread_time() >= end_s:
            is_over = True
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
            raise TookTooLong

    before = signal.signal(signal.SIGVTALRM, look)
    # The timer runs with the CPU time of all threads, so that it may signal too early, but never too late.
    signal.setitimer(signal.ITIMER_VIRTUAL, limit_s / LOOKS, limit_s / LOOKS)
    try:
        yield
    finally:
        is_over = True
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)
