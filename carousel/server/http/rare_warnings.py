"""RareWarnings: limits warnings that strangers can cause to one log line of each kind per minute."""

from __future__ import annotations

import logging
import time

PERIOD_S = 60.0
LOGGERS = (
    "uvicorn.error",
    "asyncio",
    "carousel.server.http.protocol",
    "carousel.server.http.server",
    "carousel.server.http.tls.tls_reader",
)
"""Loggers that warn about connections."""


class RareWarnings(logging.Filter):
    """Log filter that lets one warning of each kind pass in PERIOD_S, with the number of those suppressed
    since the last one. The kind is the message before its arguments are inserted.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last_s: dict[str, float] = {}
        """Time at which the last warning of a kind has passed."""
        self._num_held: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        kind, now_s = str(record.msg), time.monotonic()
        if now_s - self._last_s.get(kind, -PERIOD_S) < PERIOD_S:
            self._num_held[kind] = self._num_held.get(kind, 0) + 1
            return False
        self._last_s[kind] = now_s
        if num_held := self._num_held.pop(kind, 0):
            record.msg = f"{kind} ({num_held} more of these were left out)"
        return True


def make_warnings_rare() -> None:
    for name in LOGGERS:
        logging.getLogger(name).addFilter(RareWarnings())
