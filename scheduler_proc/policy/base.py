"""SchedulePolicy: the seam for ordering the waiting queue, and the read-only views that a policy is shown.

A policy cannot move state: it sees views and answers with positions. What it answers is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, overload

from scheduler_proc.cache.kv_cache_manager import KVCacheManager
from scheduler_proc.request import Request
from scheduler_proc.waiting_queue import WaitingQueue


class RequestView:
    """What a policy may know of a waiting request."""

    __slots__ = ("_kv", "_req")

    def __init__(self, req: Request, kv: KVCacheManager) -> None:
        self._req = req
        self._kv = kv

    @property
    def priority(self) -> int:
        """Higher goes first."""
        return self._req.priority

    @property
    def arrived_s(self) -> float:
        """time.monotonic() of its arrival in the scheduler."""
        return self._req.arrived_s

    @property
    def seq(self) -> int:
        """Its number in the order of arrival; identifies it."""
        return self._req.seq

    @property
    def namespace(self) -> bytes:
        return self._req.namespace

    @property
    def num_prompt(self) -> int:
        return self._req.num_prompt

    @property
    def num_output(self) -> int:
        """Output tokens it has already: more than none after a retraction or a resume."""
        return self._req.num_output

    @property
    def max_len(self) -> int:
        """Number of tokens, prompt and output, at which it ends."""
        return self._req.max_len

    @property
    def num_retractions(self) -> int:
        return self._req.num_retractions

    def cached_len(self) -> int:
        """Tokens of it that the prefix cache holds now. Walks the cache."""
        return self._kv.match_len(self._req)


class WaitingView(Sequence[RequestView]):
    """The waiting queue as a policy sees it: in the order (priority, retracted first, arrival)."""

    def __init__(self, queue: WaitingQueue, kv: KVCacheManager) -> None:
        self._queue = queue
        self._kv = kv

    def __len__(self) -> int:
        return len(self._queue)

    @overload
    def __getitem__(self, position: int) -> RequestView: ...
    @overload
    def __getitem__(self, position: slice) -> Sequence[RequestView]: ...
    def __getitem__(self, position: int | slice) -> RequestView | Sequence[RequestView]:
        if isinstance(position, slice):
            return [self[i] for i in range(*position.indices(len(self)))]
        return RequestView(self._queue[position], self._kv)

    @property
    def cache_version(self) -> int:
        """Changes whenever a cached_len could come out differently."""
        return self._kv.cache.version


class SchedulePolicy(Protocol):
    """Constructed without arguments, once. May be slow,
    random or depend on time: one process decides for all.
    """

    def order(self, waiting: WaitingView) -> Sequence[int]:
        """Positions in `waiting`, in the order in which the requests should be considered for admission.

        Called in each step in which something waits and a row is free. Positions left out are not considered
        in this step. An answer that is not a list of different positions, or an exception, is logged; the
        step is then scheduled first come, first served.
        """


class InvalidOrder(Exception):
    """A policy answered with something that is not an order."""


def checked_order(order: object, num_waiting: int) -> Sequence[int]:
    """What a policy answered, if it is an order of some of num_waiting positions. Raises InvalidOrder."""
    if isinstance(order, range) and order.step > 0 and order.start >= 0 and order.stop <= num_waiting:
        return order
    if not isinstance(order, Sequence):
        raise InvalidOrder(f"expected a sequence of positions, got {type(order).__name__}")
    seen: set[int] = set()
    for position in order:
        if isinstance(position, bool) or not isinstance(position, int) or not 0 <= position < num_waiting:
            raise InvalidOrder(f"{position!r} is not a position below {num_waiting}")
        if position in seen:
            raise InvalidOrder(f"position {position} stands in it twice")
        seen.add(position)
    return order
