"""Departure of a caller: ends the work for its request when the HTTP client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, MutableMapping
from typing import Any

LEAVE_S = 1.0
"""Seconds to wait for the end of sequences whose caller has left, for their trace."""


async def run_until_disconnect(
    state: MutableMapping[str, Any],
    work: Coroutine[Any, Any, None],
    leave: Callable[[], None] | None = None,
) -> None:
    """Run `work` to its end, or cancel it as soon as the HTTP client disconnects. With `leave`, which makes
    it end early, it is cancelled only after LEAVE_S, and its error is dropped. `state` is that of the
    request's scope, with `has_left` and `watch`.
    """
    departure = _Departure(leave)
    # No task that waits for it, which would cost as much as fifty lines of Python.
    state["watch"](departure.begin)
    try:
        # If the caller left while the request waited for this process, that is known now: nothing is begun.
        await asyncio.sleep(0)
        if state["has_left"]():
            return
        await work
    except asyncio.CancelledError:
        if not departure.is_its_doing():
            raise
    except Exception:
        if leave is None or not departure.has_begun:
            raise
    finally:
        departure.end()
        state["watch"](None)
        work.close()  # if it was not begun


class _Departure:
    """Ends the task that creates it when the HTTP client disconnects."""

    def __init__(self, leave: Callable[[], None] | None) -> None:
        self.has_begun = False
        self._leave = leave
        self._task = asyncio.current_task()
        self._timer: asyncio.TimerHandle | None = None
        self._has_cancelled = False

    def begin(self) -> None:
        """Ask the work to end early if it can, or cancel it."""
        if self._task is None:
            return
        self.has_begun = True
        if self._leave is None:
            self._cancel()
        else:
            self._leave()
            self._timer = asyncio.get_running_loop().call_later(LEAVE_S, self._cancel)

    def _cancel(self) -> None:
        assert self._task is not None
        self._has_cancelled = True
        self._task.cancel()

    def is_its_doing(self) -> bool:
        """Return True if the task was cancelled here, and by nobody else."""
        assert self._task is not None
        return self._has_cancelled and self._task.cancelling() == 1

    def end(self) -> None:
        """Cancel nothing from now on."""
        if self._timer is not None:
            self._timer.cancel()
        if self._has_cancelled and self._task is not None:
            self._task.uncancel()
        self._task = self._leave = None
