"""The scheduler's slot of the status page: what it shows, and when."""

from __future__ import annotations

from typing import Any

from runtime.ring.process import HEARTBEAT_S, ProcessContext
from scheduler_proc.loop import SchedulerLoad, SchedulerLoop


class Heartbeat:
    """Writes this process's slot of the status page: when it is time to, and when its load has changed."""

    def __init__(self, context: ProcessContext) -> None:
        self._context = context
        self._fields: dict[str, Any] = {}
        self._load: SchedulerLoad | None = None
        self._loop: SchedulerLoop | None = None
        self._next_at = 0.0

    def beat(self) -> None:
        """Show from within a wait that the process lives; but for the steps its figures are those of the last
        turn.
        """
        if self._loop is not None:
            self._fields |= self._loop.progress()
        self._context.beat(**self._fields)

    def show_profile(self, is_profiling: bool) -> None:
        """Show at once that a profile is being taken, or no longer: from now on the HTTP server samples all
        requests, or only its share.
        """
        self._fields["is_profiling"] = is_profiling
        self._context.beat(force=True, **self._fields)

    def show_pause(self, is_paused: bool) -> None:
        """Show the pause at once: whoever takes the place of this process reads it from the page."""
        self._fields["is_paused"] = is_paused
        self._context.beat(force=True, **self._fields)

    def beat_after(self, loop: SchedulerLoop) -> None:
        """Show what a turn has changed. Tokenizers admit by the load, so a change of it is shown at once;
        the other figures are gathered at each heartbeat only.
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
