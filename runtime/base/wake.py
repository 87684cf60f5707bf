"""Wake: a flag that a ZMQ poll can wait for. Threads and signal handlers set it; a poll would not notice
these otherwise.
"""

from __future__ import annotations

import os
from contextlib import suppress


class Wake:
    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Descriptor that is readable while the flag is set; -1 when closed."""
        self._is_set = False

    def set(self) -> None:
        # In this order, because another thread may take the flag in between. It must not then find the
        # descriptor empty that is written afterwards: a poll would return at once for ever.
        with suppress(OSError, ValueError):  # it is closed
            os.eventfd_write(self.fd, 1)
        self._is_set = True

    def take(self) -> bool:
        """Return True if the flag was set since the last call, and clear it."""
        if not self._is_set:
            return False
        self._is_set = False
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        return True

    def close(self) -> None:
        fd, self.fd = self.fd, -1  # a later signal handler must not write to another file with this number
        os.close(fd)
