"""ServingTime: clock that stands still while generation is paused. Waiting times are measured by it."""

from __future__ import annotations

from collections.abc import Callable


class ServingTime:
    """Clock without pauses. It also owns the fact that generation is paused."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._paused_s = 0.0
        """Total seconds of pauses that have ended."""
        self._paused_at = 0.0
        self.is_paused = False
        """True while generation is paused. Changed by `pause` and `resume` only."""
        self.on_change: Callable[[bool], None] = lambda is_paused: None
        """Called after each change, before anybody is told of it."""

    def now(self) -> float:
        """Return seconds since an arbitrary start."""
        return (self._paused_at if self.is_paused else self._clock()) - self._paused_s

    def pause(self) -> None:
        """Stop the clock until `resume`. A second call changes nothing."""
        if not self.is_paused:
            self.is_paused = True
            self._paused_at = self._clock()
            self.on_change(True)

    def resume(self) -> None:
        if self.is_paused:
            self.is_paused = False
            self._paused_s += self._clock() - self._paused_at
            self.on_change(False)
