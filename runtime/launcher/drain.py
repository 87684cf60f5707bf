"""Drain: the time between the first signal and the end of a launch. It decides when all requests are
answered.
"""

from __future__ import annotations

import logging
import time

from runtime.wire.status_page import StatusPage

logger = logging.getLogger(__name__)

SETTLED_S = 0.25
"""Seconds for which no request may be left before a drain is over. A slot of the status page may be half a
heartbeat old, and a request may be between two processes.
"""


class Drain:
    def __init__(self, page: StatusPage, timeout_s: float) -> None:
        """Start to drain. timeout_s: seconds that requests have left; 0: do not wait for any."""
        self._page = page
        self._timeout_s = timeout_s
        self._began = self._busy_at = time.monotonic()
        self.is_over = False
        self.was_cut = False
        """True if requests were left when the drain ended."""
        num_left = self.num_left() if timeout_s else 0
        if num_left:
            logger.info(
                "unfinished requests: %d; they have %g s, and a second signal ends them now",
                num_left,
                timeout_s,
            )

    def num_left(self) -> int:
        """Return the number of requests that run, wait or have not been read yet. It is the maximum over the
        processes, because one request is in several of them at a time.
        """
        found = dict.fromkeys(("tokenizer", "scheduler", "detokenizer", "api"), 0)
        for role, index in self._page.slots():
            if role in found:
                status = self._page.read(role, index)
                found[role] += status.num_running + status.num_waiting
        return max(found.values())

    def look(self, is_cut: bool) -> bool:
        """Return True if the drain is over. is_cut: a second signal has come, so the drain ends now."""
        now = time.monotonic()
        num_left = self.num_left()
        if num_left:
            self._busy_at = now
        late = is_cut or now - self._began >= self._timeout_s
        self.is_over = late or now - self._busy_at >= SETTLED_S
        self.was_cut = late and num_left > 0 and self._timeout_s > 0
        return self.is_over
