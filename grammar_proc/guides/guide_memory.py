"""Memory of the guides that are compiled: how much there is, and which guides have taken it.

The library says nothing of it, so it is read from the allocator after each piece of work, and what has come
is laid to the guides that were worked on.
"""

from __future__ import annotations

import ctypes
import resource
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from grammar_proc.backend import Matcher

POOL_BYTES = 512 << 20
"""Bytes that all guides may take, those that are kept and those that are in use."""
MASK_BYTES = 64 << 20
"""Bytes that one mask may take, which its guide keeps: the largest found was 31 MiB, and guides that are
compiled anew may take twice as much.
"""
LONG_READING_S = 50e-6
READING_SHARE = 0.02
"""Share of the time that readings may take once one was long: the allocator counts its free pieces."""


class _Allocated(ctypes.Structure):
    """Result of mallinfo2 of the C library."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def resident_bytes() -> int:
    """Return the bytes of physical memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _reader() -> Callable[[], int]:
    """Return the function that reads how many bytes are allocated. C libraries that do not count them, and
    have no mallinfo2, leave the process's physical memory.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return resident_bytes
    library.mallinfo2.restype = _Allocated

    def read() -> int:
        allocated = library.mallinfo2()
        return int(allocated.uordblks + allocated.hblkhd)

    return read


allocated_bytes = _reader()


def give_back() -> None:
    """Return freed memory to the system."""
    ctypes.CDLL(None).malloc_trim(0)


@dataclass(slots=True, eq=False)
class GuideCopy:
    """A compiled guide. All outputs that follow it add to what it knows, in the same place: the states of
    its texts. If there are too many of them, none of these outputs can go on in it.
    """

    start: Matcher
    grammar: str = ""
    tenant: str = ""
    num_bytes: int = 0
    """Bytes that it and its matchers take, as far as is known."""
    num_fresh_bytes: int = 0
    """The same when each of its outputs had a mask: compiled anew, it would take as much again."""
    num_masks: int = 0
    num_served: int = 0
    """Number of outputs that have ever followed it."""
    has_followed_guesses: bool = False
    handles: dict[bytes, None] = field(default_factory=dict)
    """Sequences that follow it, in the order in which they came."""

    @property
    def is_for_one(self) -> bool:
        """Return True if all that it has met are the tokens of a single output."""
        return self.num_served <= 1 and not self.has_followed_guesses

    def note(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if self.num_masks <= self.num_served:
            self.num_fresh_bytes = self.num_bytes


class HeapMeter:
    """Reads how much memory is allocated, and attributes new memory to the guides that were worked on."""

    def __init__(self, read: Callable[[], int] = allocated_bytes) -> None:
        self._read = read
        self._base = self._last = read()
        self._touched: dict[GuideCopy, None] = {}
        self._expected: dict[bytes, int] = {}
        """Bytes that guides may still take that are being compiled meanwhile."""
        self._not_before = 0.0

    @property
    def num_bytes(self) -> int:
        """Bytes that have come since the start, at the last reading."""
        return self._last - self._base

    @property
    def num_masks_at_once(self) -> int:
        """Number of masks after which to read again, so that they cannot take much more than there is."""
        return max(1, (POOL_BYTES - self.num_bytes) // MASK_BYTES)

    def touch(self, copies: Iterable[GuideCopy]) -> None:
        """Record that guides are worked on. What is allocated until the next reading is theirs."""
        self._touched.update(dict.fromkeys(copies))

    def expect(self, key: bytes, num_bytes: int) -> None:
        """Record that a guide is compiled beside other work, and takes so much."""
        self._expected[key] = num_bytes

    def is_there(self, key: bytes) -> None:
        """Record that a guide has been compiled."""
        self._expected.pop(key, None)

    def read(self, *, now: bool = False) -> None:
        """Read, and lay what has come to the guides that were worked on. `now`: also if readings have taken
        long.
        """
        if time.monotonic() < self._not_before and not now:
            return
        began = time.thread_time()
        size = self._read()
        spent_s = time.thread_time() - began
        is_long = spent_s > LONG_READING_S
        self._not_before = time.monotonic() + spent_s / READING_SHARE if is_long else 0.0
        come, self._last = size - self._last, size
        for key, expected in self._expected.items():
            taken = max(0, min(come, expected))
            self._expected[key] -= taken
            come -= taken
        for copy in self._touched:
            copy.note(max(0, come) // len(self._touched))
        self._touched.clear()


def largest(copies: Collection[GuideCopy]) -> GuideCopy:
    """Return the copy that takes the most memory, of the tenant whose copies together take the most."""
    sizes: dict[str, int] = {}
    for copy in copies:
        sizes[copy.tenant] = sizes.get(copy.tenant, 0) + copy.num_bytes
    tenant = max(sizes, key=lambda each: sizes[each])
    return max((copy for copy in copies if copy.tenant == tenant), key=lambda copy: copy.num_bytes)
