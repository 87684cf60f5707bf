"""Wake: a flag that a poll waits for. A thread sets it, or a handler of signals: what waits in a poll of ZMQ
hears of neither otherwise.
"""

from __future__ import annotations

import os
from contextlib import suppress


class Wake:
    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Descriptor that can be read while the flag is set; -1 when it is closed."""
        self._is_set = False

    def set(self) -> None:
        self._is_set = True
        with suppress(OSError, ValueError):  # it is closed, its number is -1: nobody waits any more
            os.eventfd_write(self.fd, 1)

    def take(self) -> bool:
        """Tell whether it was set since the last call."""
        if not self._is_set:
            return False
        self._is_set = False
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        return True

    def close(self) -> None:
        fd, self.fd = self.fd, -1  # a handler that comes later must not write to who gets the number next
        os.close(fd)
