"""RunningRequests: the requests that this HTTP process is answering, so that a caller may abort one by its
name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import msgspec

from carousel.server.request.labels import request_labels


class AbortOrder(msgspec.Struct, frozen=True):
    """Order to abort requests of one tenant or of all."""

    tenant: str | None
    """The tenant; None: all tenants."""
    rid: str = ""
    """Name of one prompt, or of a request with several; empty: all requests."""


class Abortable(Protocol):
    def abort(self, prompts: Collection[int]) -> None:
        """End the answers to these prompts early: their callers get the output so far. Idempotent."""


class RunningRequests:
    """Running requests, by tenant. It belongs to one event loop."""

    def __init__(self) -> None:
        self._labels: dict[str, dict[Abortable, Sequence[str]]] = {}
        """Labels of the prompts of each request, by its tenant."""
        self.num_requests = 0
        """Number of requests that are running, of all tenants."""
        self.num_prompts = 0
        """Number of their prompts, those that have ended included."""
        self.num_chars = 0
        """Number of characters, or ids, of these prompts, which are kept so that they can be sent again."""

    @contextmanager
    def hold(
        self, tenant: str, request: Abortable, labels: Sequence[str], num_chars: int = 0
    ) -> Iterator[None]:
        """Register the request while the block runs. `labels` has one for each prompt, as its caller knows
        them. `num_chars` is the length of all prompts.
        """
        own = self._labels.setdefault(tenant, {})
        own[request] = labels
        self.num_requests += 1
        self.num_prompts += len(labels)
        self.num_chars += num_chars
        try:
            yield
        finally:
            self.num_requests -= 1
            self.num_prompts -= len(labels)
            self.num_chars -= num_chars
            del own[request]
            if not own:
                del self._labels[tenant]

    def abort(self, order: AbortOrder) -> None:
        """Abort the requests that the order names. Requests that are not here have ended."""
        tenants = list(self._labels) if order.tenant is None else [order.tenant]
        for tenant in tenants:
            for request, labels in list(self._labels.get(tenant, {}).items()):
                prompts = _named(labels, order.rid)
                if prompts:
                    request.abort(prompts)


def _named(labels: Sequence[str], rid: str) -> Collection[int]:
    """Return the numbers of the prompts that an order names."""
    if not rid or (len(labels) > 1 and list(labels) == request_labels(rid, len(labels))):
        return range(len(labels))
    return [number for number, label in enumerate(labels) if label == rid]
