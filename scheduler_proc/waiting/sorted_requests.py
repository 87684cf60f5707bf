"""SortedRequests: list of requests that is kept in the order of their places. It counts their rows."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeAlias, TypeVar

Place: TypeAlias = tuple[int, bool, float, int]
"""Sort key in the waiting queue; the lowest goes first."""


class Placed(Protocol):
    """Object with a place in the waiting queue."""

    place: Place
    width: int

    @property
    def num_tokens(self) -> int: ...


R = TypeVar("R", bound=Placed)


class SortedRequests(Generic[R]):
    """Requests in the order of their places. No two places are equal, since arrival numbers differ."""

    def __init__(self, requests: Iterable[R] = ()) -> None:
        """requests: initial content, in order."""
        self.version = 0
        """Number that changes whenever a request is added or removed."""
        self.requests: list[R] = list(requests)
        """Requests in order, changed by this class alone."""
        self._places: list[Place] = [req.place for req in self.requests]
        self.num_rows = sum(req.width for req in self.requests)
        """Number of rows that they need; a beam search needs several."""

    def __len__(self) -> int:
        return len(self.requests)

    def __getitem__(self, position: int) -> R:
        return self.requests[position]

    def __iter__(self) -> Iterator[R]:
        return iter(self.requests)

    def num_tokens(self) -> int:
        """Return the number of tokens to compute for all requests, cached ones included. Walks them."""
        return sum(req.num_tokens for req in self.requests)

    def put(self, req: R) -> None:
        """Insert a request at its place."""
        self.version += 1
        self.num_rows += req.width
        place, places = req.place, self._places
        if not places or place > places[-1]:  # nearly always
            places.append(place)
            self.requests.append(req)
            return
        position = bisect.bisect(places, place)
        places.insert(position, place)
        self.requests.insert(position, req)

    def remove(self, req: R) -> None:
        position = bisect.bisect_left(self._places, req.place)
        assert self.requests[position] is req
        self._remove_slice(position, position + 1)

    def _remove_slice(self, start: int, end: int) -> None:
        self.version += 1
        self.num_rows -= sum([req.width for req in self.requests[start:end]])
        del self.requests[start:end]
        del self._places[start:end]
