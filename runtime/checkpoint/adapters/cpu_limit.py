"""A limit on the CPU time of work that has no steps to be counted, such as a search with a pattern."""

from __future__ import annotations

import signal
import time
from types import FrameType

LOOKS = 8
"""Number of times that the clock is looked at within the limit, if no other thread works."""


class TookTooLong(Exception):
    """The work has used all the CPU time that it may use."""


class CpuLimit:
    """Context in which TookTooLong is raised once this thread has used so many seconds of CPU, and again
    until the block is left: a finalizer or a callback may have swallowed it. For the main thread only, since
    it uses a signal (SIGVTALRM).

    Python code and regular expressions end then. Other code in C is not interrupted, and the error comes
    after it.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s

    def __enter__(self) -> None:
        self._end_s = time.thread_time() + self._limit_s
        self._before = signal.signal(signal.SIGVTALRM, self._look)
        # The timer runs with the CPU time of all threads, so that it may signal too early, but never too
        # late.
        every_s = self._limit_s / LOOKS
        signal.setitimer(signal.ITIMER_VIRTUAL, every_s, every_s)

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, self._before)
        if error is None and self._is_over:
            raise TookTooLong

    @property
    def _is_over(self) -> bool:
        return time.thread_time() >= self._end_s

    def _look(self, _: int, frame: FrameType | None) -> None:
        # An error in __exit__ would leave the timer behind.
        is_leaving = frame is not None and frame.f_code is CpuLimit.__exit__.__code__
        if not is_leaving and self._is_over:
            raise TookTooLong
