"""EventLog: what happened to the processes of a launch, one JSON object a line, in its run directory.

Names, numbers and reasons only: nothing of a request is ever written here.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import msgspec

logger = logging.getLogger(__name__)


class EventLog:
    def __init__(self, path: Path) -> None:
        """Raises OSError when the file cannot be made."""
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._failed = False

    def write(self, event: str, **fields: str | int | float | None) -> None:
        """Append an event; a field that is None is left out. A full disk costs lines, not a server."""
        kept = {name: value for name, value in fields.items() if value is not None}
        line = msgspec.json.encode({"time": round(time.time(), 3), "event": event, **kept}) + b"\n"
        try:
            os.write(self._fd, line)
        except OSError as error:
            if not self._failed:
                logger.warning("events are not written any more: %s", error)
            self._failed = True

    def close(self) -> None:
        os.close(self._fd)
