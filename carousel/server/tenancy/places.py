"""Places: limits how many sequences the callers of an HTTP process may have running or waiting in
the ring.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from carousel.server.tenancy.shares import Shares
from runtime.base.errors import InvalidRequest, Overloaded, RateLimited
from runtime.ring.tenants import Tenant
from runtime.settings.config import RuntimeConfig


class Places:
    """Places for sequences. Sequences beyond them are refused here, which costs less than a refusal by the
    ring.
    """

    def __init__(
        self, config: RuntimeConfig, has_tenants: Callable[[], bool], is_alone: Callable[[], bool]
    ) -> None:
        """`has_tenants` returns True if there are several, and `is_alone` returns True if the ring has no
        other client.
        """
        self._config = config
        self._is_alone = is_alone
        self._shares = Shares(1, has_tenants)
        self._resize(config.max_waiting_of_lone_client)

    def _resize(self, max_waiting: int) -> None:
        num_rows = self._config.max_running_requests
        self._shares.resize(num_rows + max_waiting, num_rows + (3 * max_waiting + 3) // 4)

    @property
    def num_sequences(self) -> int:
        """Return the number of places that are taken, by sequences that run or wait."""
        return self._shares.total

    def most_at_once(self, tenant: Tenant, max_in_flight: int) -> int:
        """Return the number of sequences of one request to begin together, if that may be chosen. Of
        `max_in_flight` sequences in the ring none is refused.
        """
        most, limits = min(self._most_of(tenant), max_in_flight), tenant.limits
        return most if limits is None or limits.max_waiting is None else min(most, limits.max_waiting)

    def _most_of(self, tenant: Tenant) -> int:
        """Return the maximum number of sequences that a tenant may have at a time."""
        self._resize(self._config.max_waiting_of_lone_client)
        most, limits = self._shares.most, tenant.limits
        if limits is None or limits.max_waiting is None:
            return most
        return min(most, (limits.max_running or self._config.max_running_requests) + limits.max_waiting)

    def hold(self, tenant: Tenant, num_sequences: int) -> HeldPlaces:
        """Take places, which are given back at the end of a `with` block.

        Raises: Overloaded if this process has no room, RateLimited if the tenant has used its share,
        InvalidRequest for more than there can ever be.
        """
        self._check(tenant, num_sequences)
        return HeldPlaces(self._shares, tenant.name, num_sequences)

    def _check(self, tenant: Tenant, num_new: int) -> None:
        most, shares, num_own = self._most_of(tenant), self._shares, self._shares.of(tenant.name)
        if num_new > most:
            whose = "this server runs and queues" if most == shares.size else "this API key may have"
            raise InvalidRequest(
                f"{num_new} sequences at once; {whose} {most} at most. Ask for fewer, or for several prompts "
                "without stream: they are then begun as there is room"
            )
        if not self._is_alone():
            self._resize(self._config.max_waiting_of_client)
        is_beyond = num_own + num_new > most and most < shares.size
        if num_own and (is_beyond or not shares.may_have(tenant.name, num_new)):
            raise RateLimited(
                f"{num_own} sequences of this API key are running or waiting, which is its share of this "
                "server; try again when some have ended"
            )
        if shares.total and not (shares.has_room(num_new) and shares.may_have(tenant.name, num_new)):
            raise Overloaded(
                "as many sequences as this server may have are running or waiting; try again later",
                code="client_overloaded",
            )


class HeldPlaces:
    """Places of one request. It gives them back as its sequences end."""

    def __init__(self, shares: Shares, tenant: str, num_sequences: int) -> None:
        shares.take(tenant, num_sequences)
        self._shares = shares
        self._tenant = tenant
        self.num_sequences = num_sequences
        """Number of places that it still has."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back(self.num_sequences)

    def give_back(self, num_sequences: int) -> None:
        self._shares.give_back(self._tenant, num_sequences)
        self.num_sequences -= num_sequences
