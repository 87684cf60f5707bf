"""IdSet: a set of millions of ids, in a few bytes for each."""

from __future__ import annotations

from array import array
from hashlib import blake2b

DIGEST_BYTES = 8
FIRST_SLOTS = 1 << 10
MAX_LOAD = 2 / 3
"""Share of the slots in use from which on there are twice as many."""


class IdSet:
    """Set of texts and numbers, kept as digests of 8 bytes in a table: 12 to 24 bytes each, where a set of
    strings has about 100. Two of ten million ids have the same digest once in 400,000 sets.
    """

    def __init__(self) -> None:
        self._slots = _empty(FIRST_SLOTS)
        """Open addressing: each digest is at its own slot or the next free one; 0 is free."""
        self._num_used = 0

    def __len__(self) -> int:
        return self._num_used

    def __contains__(self, name: str | int) -> bool:
        digest = _digest(name)
        return self._slots[_slot_of(self._slots, digest)] == digest

    def add(self, name: str | int) -> bool:
        """Add an id. Returns False if it was there."""
        digest = _digest(name)
        at = _slot_of(self._slots, digest)
        if self._slots[at]:
            return False
        self._slots[at] = digest
        self._num_used += 1
        if self._num_used > MAX_LOAD * len(self._slots):
            larger = _empty(2 * len(self._slots))
            for each in filter(None, self._slots):
                larger[_slot_of(larger, each)] = each
            self._slots = larger
        return True


def _empty(num_slots: int) -> array[int]:
    return array("Q", bytes(DIGEST_BYTES * num_slots))


def _digest(name: str | int) -> int:
    written = str(name) if isinstance(name, int) else f"={name}"
    return int.from_bytes(blake2b(written.encode(), digest_size=DIGEST_BYTES).digest()) or 1


def _slot_of(slots: array[int], digest: int) -> int:
    """Return the slot of a digest, or the free one for it."""
    mask = len(slots) - 1
    at = digest & mask
    while slots[at] and slots[at] != digest:
        at = at + 1 & mask
    return at
