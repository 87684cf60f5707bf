"""Drain: the time between the first signal and the end. Says when all that was asked for is answered."""

from __future__ import annotations

import logging
import time

from runtime.wire.status_page import StatusPage

logger = logging.getLogger(__name__)

SETTLED_S = 0.25
"""Seconds for which nothing may be left before a drain is over: a slot may be half a heartbeat old, a request
between two processes.
"""


class Drain:
    def __init__(self, page: StatusPage, timeout_s: float) -> None:
        """Begin to drain. `timeout_s`: the time that requests have; 0: none is waited for."""
        self._page = page
        self._timeout_s = timeout_s
        self._began = self._busy_at = time.monotonic()
        self.is_over = False
        self.was_cut = False
        """True if requests were left when it ended."""
        num_left = self.num_left() if timeout_s else 0
        if num_left:
            logger.info(
                "unfinished requests: %d; they have %g s, and a second signal ends them now",
                num_left,
                timeout_s,
            )

    def num_left(self) -> int:
        """Requests that run, wait or have not been read yet: as many as the place has that has the most,
        since one is in several places at the same time.
        """
        found = dict.fromkeys(("tokenizer", "scheduler", "detokenizer", "api"), 0)
        for role, index in self._page.slots():
            if role in found:
                status = self._page.read(role, index)
                found[role] += status.num_running + status.num_waiting
        return max(found.values())

    def look(self, is_cut: bool) -> bool:
        """Tell whether the drain is over. `is_cut`: somebody does not want to wait any more."""
        now = time.monotonic()
        num_left = self.num_left()
        if num_left:
            self._busy_at = now
        late = is_cut or now - self._began >= self._timeout_s
        self.is_over = late or now - self._busy_at >= SETTLED_S
        self.was_cut = late and num_left > 0 and self._timeout_s > 0
        return self.is_over
