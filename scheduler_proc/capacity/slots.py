"""SlotPool: who occupies which of the device's slots. Knows no request."""

from __future__ import annotations

from collections.abc import Hashable


class SlotPool:
    """The device's slots for what several requests may share, such as adapters. Counts leases by key."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._leases: dict[Hashable, int] = {}

    def can_hold(self, key: Hashable) -> bool:
        return key is None or key in self._leases or len(self._leases) < self.num_slots

    def take(self, key: Hashable) -> None:
        if key is not None:
            assert self.can_hold(key)
            self._leases[key] = self._leases.get(key, 0) + 1

    def give_back(self, key: Hashable) -> None:
        if key is not None:
            self._leases[key] -= 1
            if not self._leases[key]:
                del self._leases[key]

    @property
    def num_used(self) -> int:
        return len(self._leases)
