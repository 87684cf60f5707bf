"""Shares: how the tenants of an HTTP process divide a resource."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable


class Shares:
    """Number of places, bytes or characters, and how many of them each tenant has.

    A tenant that is alone may have all of them. With several tenants, one may have `most_of_one` while the
    others have none. What the others have lowers its limit: a tenant may have the number of free units times
    most_of_one / (size - most_of_one). So the next tenant finds some free.
    """

    def __init__(self, size: int, is_divided: Callable[[], bool], most_of_one: int | None = None) -> None:
        """`is_divided` returns True if there are several tenants; `most_of_one` is three quarters
        by default.
        """
        self._is_divided = is_divided
        self.total = 0
        self._counts: Counter[str] = Counter()
        self.resize(size, most_of_one)

    def resize(self, size: int, most_of_one: int | None = None) -> None:
        """Set how many units there are to divide. Nobody loses units that it has."""
        self.size = size
        self._most_of_one = (3 * size + 3) // 4 if most_of_one is None else most_of_one

    @property
    def most(self) -> int:
        """Return how many units a tenant may have while no other has any."""
        return self._most_of_one if self._is_divided() else self.size

    def of(self, tenant: str) -> int:
        """Return how many units a tenant has."""
        return self._counts[tenant]

    def has_room(self, amount: int) -> bool:
        """Return True if `amount` more units are free."""
        return self.total + amount <= self.size

    def may_have(self, tenant: str, amount: int) -> bool:
        """Return True if the share of a tenant includes `amount` more units, free or not."""
        if not self._is_divided():
            return True
        num_before = amount - 1  # all units except the last, which must find a free one, too
        num_own, num_free = self._counts[tenant] + num_before, self.size - self.total - num_before
        return num_own * (self.size - self._most_of_one) < self._most_of_one * num_free

    def take(self, tenant: str, amount: int) -> None:
        self.total += amount
        self._counts[tenant] += amount

    def give_back(self, tenant: str, amount: int) -> None:
        self.total -= amount
        self._counts[tenant] -= amount
        if not self._counts[tenant]:
            del self._counts[tenant]
