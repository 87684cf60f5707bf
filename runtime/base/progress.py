"""Progress: shows the progress of a long task on standard error, as a bar on a terminal and otherwise as a
line now and then.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from runtime.base.console import is_terminal, write_line, write_over

LINE_S = 5.0
"""Seconds between two lines where there is no terminal."""
DRAW_S = 0.1
"""Seconds between two drawings of a bar."""
BAR_CHARS = 30


class Progress:
    def __init__(
        self,
        what: str,
        unit: str,
        *,
        say: Callable[[str], None] = write_line,
        has_bar: bool | None = None,
    ) -> None:
        """what: name of the task. unit: name of the units that are counted, in the plural. say: writes a line
        if there is no bar. has_bar: None asks whether standard error is a terminal.
        """
        self._what = what
        self._unit = unit
        self._say = say
        self._has_bar = is_terminal() if has_bar is None else has_bar
        self._interval_s = DRAW_S if self._has_bar else LINE_S
        self._next_at = time.monotonic() + (0.0 if self._has_bar else self._interval_s)

    def note(self, done: int, total: int, more: str = "") -> None:
        """Show that `done` of `total` units are done, followed by the text `more`."""
        now = time.monotonic()
        if now < self._next_at and not (self._has_bar and done >= total):
            return
        self._next_at = now + self._interval_s
        percent = 100 * done // total if total else 100
        counts = f"{done} of {total} {self._unit} ({percent} %){more}"
        if not self._has_bar:
            self._say(f"{self._what}: {counts}")
        elif done >= total:
            write_over("")
        else:
            full = BAR_CHARS * percent // 100
            write_over(f"{self._what} [{'#' * full}{' ' * (BAR_CHARS - full)}] {counts}")
