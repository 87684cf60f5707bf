"""GarbageWatch: collects garbage when the process has grown, and else now and then.

Python's own collector looks each time that some hundred objects more have been made than freed, whoever keeps
them, and every so often through all that lives, which is a turn of the event loop. Requests and connections
end with their last owner here and leave nothing to find, so what it looks through is what is in use.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path

LEAST_OBJECTS = 5000
"""Objects, beyond those that lived before, for which a collection is worth its time: 2 to 5 ms."""
LEAST_BYTES = 32 << 20
"""Growth for which it is, too: what is left may be few objects that hold large bodies."""
LEAST_S = 1.0
"""Shortest time between two collections because of bytes: it may be that all of them are in use."""
USUAL_S = 10.0
"""Time after which whatever is left is found: a connection that is counted until it is let go, say."""
REST_RATIO = 1000
"""And as many times as long as the last collection took. One of 8,000 connections takes 0.1 s."""
STATM = Path("/proc/self/statm")


def stop_automatic_collections() -> None:
    """Leave out of all collections what is there now, and have none but those of a GarbageWatch."""
    gc.collect()
    gc.freeze()
    gc.disable()


def resident_bytes() -> int:
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class GarbageWatch:
    """Watch over a process without automatic collections."""

    def __init__(
        self,
        bytes_in_use: Callable[[], int],
        *,
        resident: Callable[[], int] = resident_bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """bytes_in_use: gives how many of the process are known to be in use, which are not counted."""
        self._bytes_in_use = bytes_in_use
        self._resident = resident
        self._clock = clock
        self._num_living = 0
        """Objects that the last collection has left, but for those left out of it."""
        self._collected_s = clock()
        self._rest_s = USUAL_S
        self._fewest_bytes = self._num_bytes()
        """Fewest in use since the last collection."""

    def look(self) -> None:
        """Collect if it is time. Takes some microseconds where it is not."""
        num_new = gc.get_count()[0]  # without automatic collections, since the last one
        num_bytes, waited_s = self._num_bytes(), self._clock() - self._collected_s
        self._fewest_bytes = min(self._fewest_bytes, num_bytes)
        if (
            num_new >= max(LEAST_OBJECTS, self._num_living // 2)
            or (num_bytes - self._fewest_bytes >= LEAST_BYTES and waited_s >= LEAST_S)
            or (num_new and waited_s >= self._rest_s)
        ):
            self._collect()

    def _collect(self) -> None:
        began_s = time.thread_time()
        gc.collect()
        self._rest_s = max(USUAL_S, REST_RATIO * (time.thread_time() - began_s))
        self._num_living = len(gc.get_objects())
        self._collected_s = self._clock()
        self._fewest_bytes = self._num_bytes()

    def _num_bytes(self) -> int:
        return self._resident() - self._bytes_in_use()
