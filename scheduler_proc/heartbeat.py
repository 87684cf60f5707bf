"""Heartbeat: writes the scheduler's slot of the status page."""

from __future__ import annotations

from typing import Any

from runtime.ring.process import HEARTBEAT_S, ProcessContext
from scheduler_proc.loop import SchedulerLoad, SchedulerLoop


class Heartbeat:
    """Writes this process's slot of the status page, at regular times and whenever its load has changed."""

    def __init__(self, context: ProcessContext) -> None:
        self._context = context
        self._fields: dict[str, Any] = {}
        self._load: SchedulerLoad | None = None
        self._loop: SchedulerLoop | None = None
        self._next_at = 0.0

    def beat(self) -> None:
        """Show that the process is alive during a wait. Except for the number of steps, the figures are those
        of the last turn.
        """
        if self._loop is not None:
            self._fields |= self._loop.progress()
        self._context.beat(**self._fields)

    def show_profile(self, is_profiling: bool) -> None:
        """Show at once whether a profile is being taken. Meanwhile the HTTP server samples all requests,
        instead of a share.
        """
        self._fields["is_profiling"] = is_profiling
        self._context.beat(force=True, **self._fields)

    def show_pause(self, is_paused: bool) -> None:
        """Show a pause at once, because a process that replaces this one reads it from the page."""
        self._fields["is_paused"] = is_paused
        self._context.beat(force=True, **self._fields)

    def beat_after(self, loop: SchedulerLoop) -> None:
        """Show the changes of a turn. Tokenizers admit requests by the load, so a change of it is shown at
        once; the other figures are gathered at each heartbeat.
        """
        self._loop = loop
        now = loop.now_s()
        load = loop.load()
        if now >= self._next_at:
            self._next_at = now + HEARTBEAT_S / 2
            self._fields = loop.status()
        elif load != self._load:
            self._fields |= load._asdict() | loop.progress()
        else:
            return
        self._load = load
        self._context.beat(force=True, **self._fields)
