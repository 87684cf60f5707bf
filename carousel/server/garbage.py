"""GarbageWatch: runs a full garbage collection when the process has grown, and not before.

Python's collector checks new objects each time that some hundred more have been made than freed, and
sometimes all live objects, which takes half a microsecond for each and holds up the event loop. Requests and
connections end with their last owner here, so it would find nothing.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

NEW_OBJECTS = 2000
"""Number of new objects after which Python collects its first generation, which takes 1 ms."""
NEW_COLLECTIONS = 3
"""Collections of the first generation after which the second one is collected, too."""
NEVER = 1 << 30
"""Collections of the second generation after which Python would collect the third one by itself: never."""
LOOKED_AT = 8
"""Collections of the second generation after which the objects of the third one are counted, if there may be
many. Counting takes a fifth of the time of a full collection.
"""
OLD_OBJECTS = 50_000
"""Growth of the third generation that starts a full collection, if it is also at least the number of objects
that the last one left, and of those in use.
"""
GROWN_BYTES = 48 << 20
"""Growth of resident memory, in bytes, that starts a full collection: garbage may be a few objects with large
bodies. It must also be as much as is in use, since that is only estimated.
"""
REST_S = 1.0
"""Least seconds between a full collection and one that is due to memory, because all of the memory may be in
use.
"""
STATM = Path("/proc/self/statm")
STATM_BYTES = 256
"""Number of bytes that hold its seven numbers."""


class Size(NamedTuple):
    """Size of a part of the process."""

    num_objects: int = 0
    """Number of objects that Python's collector looks through."""
    num_blocks: int = 0
    """Number of Python's memory blocks, which most objects are, those included that it does not look through.
    """
    num_bytes: int = 0

    def plus(self, other: Size, count: int = 1) -> Size:
        """Return the size with `count` times another one added."""
        return Size(
            self.num_objects + count * other.num_objects,
            self.num_blocks + count * other.num_blocks,
            self.num_bytes + count * other.num_bytes,
        )


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
        in_use: Callable[[], Size] = Size,
        *,
        resident: Callable[[], int] = resident_bytes,
        blocks: Callable[[], int] = sys.getallocatedblocks,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`in_use` returns how much of the process is known to be in use, which does not count as growth.
        `blocks` returns the number of memory blocks; unlike the number of objects it is found at once.
        """
        self._in_use = in_use
        self._resident = resident
        self._blocks = blocks
        self._clock = clock
        self._num_living = 0
        """Number of objects that the last full collection has left."""
        self._num_looked_at = 0
        """Number of collections of new objects when the old ones were last looked at."""
        self._num_blocks = 0
        """Number of blocks beside those in use when they were last counted."""
        self._fewest_bytes = 0
        """Least number of bytes beside those in use, since the last full collection."""
        self._most_in_use = 0
        """Largest number of bytes in use at a time since then. malloc may keep that much when they end."""
        self._collected_s = 0.0
        self._note_collection()

    def look(self) -> None:
        """Run a full collection if it is due. Takes some microseconds if it is not."""
        in_use, resident = self._in_use(), self._resident()
        self._fewest_bytes = min(self._fewest_bytes, resident - in_use.num_bytes)
        self._most_in_use = max(self._most_in_use, in_use.num_bytes)
        has_rested = self._clock() - self._collected_s >= REST_S
        much = max(GROWN_BYTES, self._most_in_use)
        has_swollen = has_rested and resident - self._most_in_use - self._fewest_bytes >= much
        # Where collections are off, the new objects will be frozen, and must not be collected before.
        if gc.isenabled() and (has_swollen or self._has_many_old_objects(in_use)):
            gc.collect()
            self._note_collection()

    def _note_collection(self) -> None:
        in_use = self._in_use()
        self._num_living = len(gc.get_objects()) - in_use.num_objects
        self._num_looked_at = 0
        self._num_blocks = self._blocks() - in_use.num_blocks
        self._most_in_use = in_use.num_bytes
        self._fewest_bytes = self._resident() - in_use.num_bytes
        self._collected_s = self._clock()

    def _has_many_old_objects(self, in_use: Size) -> bool:
        num_collections = gc.get_count()[2]  # collections of new objects since the last full one
        self._num_looked_at = min(self._num_looked_at, num_collections)
        if num_collections - self._num_looked_at < LOOKED_AT:
            return False
        self._num_looked_at = num_collections
        many = max(OLD_OBJECTS, self._num_living, in_use.num_objects)
        num_blocks = self._blocks() - in_use.num_blocks
        self._num_blocks = min(self._num_blocks, num_blocks)
        if num_blocks - self._num_blocks < many:
            return False
        self._num_blocks = num_blocks
        return len(gc.get_objects(generation=2)) - in_use.num_objects - self._num_living >= many
