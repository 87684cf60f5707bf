"""Watchdog: distinguishes processes that hang from slow ones. The launcher kills the processes that it
reports.

A work loop writes its own heartbeat, so the heartbeat stops when the loop spins or waits for ever. Only a
step of the model may take longer than a loop's turn; the scheduler's step counters show that it advances.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from runtime.launcher.hosts.host import Child
from runtime.ring.liveness import may_be_silent
from runtime.settings.config import RuntimeConfig
from runtime.wire.status_page import ProcessStatus, StatusPage

STOPPED_S = 3.0
"""Seconds after which a process that was stopped (SIGSTOP) is killed. A process that continues before is left
alone.
"""
STOPPED = f"it has been stopped for {STOPPED_S:.0f} s"
LOOK_S = 0.25
MAX_LOOK_S = 1.0
"""Maximum time between two looks that counts. A longer gap means that the launcher itself was delayed."""


class Hang(NamedTuple):
    """Process to kill, and the reason."""

    child: Child
    reason: str
    is_stopped: bool
    """True if a signal from outside has stopped it, which no request can cause."""


class _Unchanged:
    """Time for which a value has not changed, counted in watched time only."""

    __slots__ = ("_value", "seconds")

    def __init__(self) -> None:
        self._value: Any = None
        self.seconds = 0.0

    def note(self, value: Any, elapsed_s: float) -> float:
        self.seconds = self.seconds + elapsed_s if value == self._value else 0.0
        self._value = value
        return self.seconds


class _Watched:
    """State that is kept about one process."""

    __slots__ = ("progress", "silence", "stop")

    def __init__(self) -> None:
        self.stop = _Unchanged()
        self.silence = _Unchanged()
        self.progress = _Unchanged()


class Watchdog:
    def __init__(self, page: StatusPage, config: RuntimeConfig) -> None:
        self._page = page
        self._config = config
        self._watched: dict[Child, _Watched] = {}
        self._looked_at = 0.0

    def look(self, children: Iterable[Child], now: float | None = None) -> Iterator[Hang]:
        """Yield the processes to kill. Call it at least every MAX_LOOK_S; it looks every LOOK_S."""
        now = time.monotonic() if now is None else now
        elapsed_s = now - self._looked_at
        if elapsed_s < LOOK_S:
            return
        self._looked_at = now
        watched, self._watched = self._watched, {}
        scheduler = self._page.read("scheduler")
        for child in children:
            entry = self._watched[child] = watched.get(child) or _Watched()
            problem = self._problem(child, entry, scheduler, min(elapsed_s, MAX_LOOK_S), now)
            if problem:
                yield Hang(child, problem, problem == STOPPED)

    def _problem(
        self, child: Child, entry: _Watched, scheduler: ProcessStatus, elapsed_s: float, now: float
    ) -> str:
        stopped = child.is_stopped
        if entry.stop.note(stopped, elapsed_s) >= STOPPED_S and stopped:
            return STOPPED
        config, role = self._config, child.place.role
        if not child.is_ready:
            late = now - child.started_at > config.start_timeout
            return f"not ready within {config.start_timeout:g} s" if late else ""
        status = self._page.read(role, child.place.index)
        silent_s = entry.silence.note(status.heartbeat_ns, elapsed_s)
        in_step = may_be_silent(role, config, scheduler)
        if silent_s >= (config.step_timeout if in_step else config.stall_timeout):
            return f"no turn of its work loop for {silent_s:.0f} s"
        if role == "scheduler":
            is_held_up = scheduler.is_paused or scheduler.is_in_call
            has_work = scheduler.num_running + scheduler.num_waiting > 0 and not is_held_up
            is_waiting = has_work or scheduler.num_launched > scheduler.num_finished
            stuck_s = entry.progress.note(scheduler.num_finished if is_waiting else -1, elapsed_s)
            if is_waiting and stuck_s >= config.step_timeout:
                return f"requests are there, but no step has ended for {stuck_s:.0f} s"
        return ""
