"""GarbageWatch: runs a full garbage collection when the process has grown, and not before.

Python's collector checks new objects each time that some hundred more have been made than freed, and
sometimes all live objects, which takes half a microsecond for each and holds up the event loop. Requests and
connections end with their last owner here, so it would find nothing.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

NEW_OBJECTS = 2000
"""Number of new objects after which Python collects its first generation, which takes 1 ms."""
NEW_COLLECTIONS = 3
"""Collections of the first generation after which the second one is collected, too."""
NEVER = 1 << 30
"""Collections of the second generation after which Python would collect the third one by itself: never."""
LOOKED_AT = 8
"""Collections of the second generation after which the objects of the third one are counted. Counting takes a
tenth of the time of a full collection.
"""
OLD_OBJECTS = 50_000
"""Growth of the third generation that starts a full collection, if the generation has also at least doubled.
"""
GROWN_BYTES = 48 << 20
"""Growth of resident memory, in bytes, that starts a full collection: garbage may be a few objects with large
bodies.
"""
REST_S = 1.0
"""Least seconds between a full collection and one that is due to memory, because all of the memory may be in
use.
"""
STATM = Path("/proc/self/statm")
STATM_BYTES = 256
"""Number of bytes that hold its seven numbers."""


def collect_new_objects_alone() -> None:
    """Freeze the objects that exist now, and let Python collect only its first two generations. A
    GarbageWatch collects the third one.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, NEW_COLLECTIONS, NEVER)


@cache
def _statm() -> int:
    """Return the descriptor of this process's STATM. It stays open: to open the file for each look, 20 times
    a second, cost a process without requests a quarter of its CPU time.
    """
    return os.open(STATM, os.O_RDONLY | os.O_CLOEXEC)


def resident_bytes() -> int:
    return int(os.pread(_statm(), STATM_BYTES, 0).split()[1]) * os.sysconf("SC_PAGE_SIZE")


class GarbageWatch:
    """Watch over a process where Python collects new objects only."""

    def __init__(
        self,
        bytes_in_use: Callable[[], int],
        *,
        objects_in_use: Callable[[], int] = lambda: 0,
        resident: Callable[[], int] = resident_bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`bytes_in_use` and `objects_in_use` return how much of the process is known to be in use, which
        does not count as growth.
        """
        self._objects_in_use = objects_in_use
        self._bytes_in_use = bytes_in_use
        self._resident = resident
        self._clock = clock
        self._num_living = 0
        """Number of objects that the last full collection has left."""
        self._num_looked_at = 0
        """Number of collections of new objects when the old ones were last counted."""
        self._fewest_bytes = 0
        """Least number of bytes since the last full collection."""
        self._collected_s = 0.0
        self._note_collection()

    def look(self) -> None:
        """Run a full collection if it is due. Takes some microseconds if it is not."""
        num_bytes = self._num_bytes()
        self._fewest_bytes = min(self._fewest_bytes, num_bytes)
        has_rested = self._clock() - self._collected_s >= REST_S
        has_swollen = has_rested and num_bytes - self._fewest_bytes >= GROWN_BYTES
        # Where collections are off, the new objects will be frozen, and must not be collected before.
        if gc.isenabled() and (has_swollen or self._has_many_old_objects()):
            gc.collect()
            self._note_collection()

    def _note_collection(self) -> None:
        self._num_living = len(gc.get_objects()) - self._objects_in_use()
        self._num_looked_at = 0
        self._fewest_bytes = self._num_bytes()
        self._collected_s = self._clock()

    def _has_many_old_objects(self) -> bool:
        num_collections = gc.get_count()[2]  # collections of new objects since the last full one
        self._num_looked_at = min(self._num_looked_at, num_collections)
        if num_collections - self._num_looked_at < LOOKED_AT:
            return False
        self._num_looked_at = num_collections
        num_old = len(gc.get_objects(generation=2)) - self._objects_in_use() - self._num_living
        return num_old >= max(OLD_OBJECTS, self._num_living)

    def _num_bytes(self) -> int:
        return self._resident() - self._bytes_in_use()
