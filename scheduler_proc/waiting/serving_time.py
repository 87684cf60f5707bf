"""ServingTime: a clock that stands still while generation is paused. Waiting is measured by it."""

from __future__ import annotations

from collections.abc import Callable


class ServingTime:
    """Says whether generation is paused, too: there is one owner of both."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._paused_s = 0.0
        """In pauses that have ended."""
        self._paused_at = 0.0
        self.is_paused = False
        """Changed by `pause` and `go_on` only."""
        self.on_change: Callable[[bool], None] = lambda is_paused: None
        """Called after each change, before anybody is told of it."""

    def now(self) -> float:
        """Return seconds, from an arbitrary start."""
        return (self._paused_at if self.is_paused else self._clock()) - self._paused_s

    def pause(self) -> None:
        """Stand still until `go_on`. Once more changes nothing."""
        if not self.is_paused:
            self.is_paused = True
            self._paused_at = self._clock()
            self.on_change(True)

    def go_on(self) -> None:
        if self.is_paused:
            self.is_paused = False
            self._paused_s += self._clock() - self._paused_at
            self.on_change(False)
