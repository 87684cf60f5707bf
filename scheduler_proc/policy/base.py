"""SchedulePolicy: interface of policies that order the waiting queue, and the read-only views that a policy
gets.

A policy cannot change state: it sees views and answers with positions, which are checked.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, overload

from scheduler_proc.cache.kv_cache_manager import KVCacheManager
from scheduler_proc.core.request import Request
from scheduler_proc.waiting.waiting_queue import SortKey, WaitingQueue, in_turn

logger = logging.getLogger(__name__)


class RequestView:
    """Properties of a waiting request that a policy may use."""

    __slots__ = ("_kv", "_req")

    def __init__(self, req: Request, kv: KVCacheManager) -> None:
        self._req = req
        self._kv = kv

    @property
    def priority(self) -> int:
        """Scheduling priority; higher goes first."""
        return self._req.priority

    @property
    def arrived_s(self) -> float:
        """Time at which the caller asked, on the clock of `clock`. It is the caller's own statement, but not
        later than the request's arrival here.
        """
        return self._req.arrived_s

    @property
    def seq(self) -> int:
        """Number of the request in the order of arrival; identifies it."""
        return self._req.seq

    @property
    def namespace(self) -> bytes:
        return self._req.namespace

    @property
    def num_prompt(self) -> int:
        return self._req.num_prompt

    @property
    def num_output(self) -> int:
        """Number of output tokens that it has already; above 0 after a retraction or a resume."""
        return self._req.num_output

    @property
    def max_len(self) -> int:
        """Number of tokens, prompt and output, at which it ends."""
        return self._req.max_len

    @property
    def num_retractions(self) -> int:
        return self._req.num_retractions

    def cached_len(self) -> int:
        """Number of its tokens that the prefix cache holds now. Walks the cache."""
        return self._kv.match_len(self._req)

    def cached_path(self) -> tuple[int, ...]:
        """Numbers of the prefix cache nodes that hold its cached tokens, from the root down. Requests that
        share a prefix share the beginning of this tuple. Walks the cache.
        """
        return self._kv.match_path(self._req)


class WaitingView(Sequence[RequestView]):
    """The waiting queue as a policy sees it, without requests that have waited for max_starvation. It is
    ordered by priority, then retracted requests first, then the policy's key or, without one, tenants in
    turns, then arrival.
    """

    def __init__(self, queue: WaitingQueue, kv: KVCacheManager, num_starved: int = 0) -> None:
        """num_starved: number of requests at the front of the queue that are not shown."""
        self._queue = queue
        self._kv = kv
        self._num_starved = num_starved

    def __len__(self) -> int:
        return len(self._queue) - self._num_starved

    @overload
    def __getitem__(self, position: int) -> RequestView: ...
    @overload
    def __getitem__(self, position: slice) -> Sequence[RequestView]: ...
    def __getitem__(self, position: int | slice) -> RequestView | Sequence[RequestView]:
        shown = range(self._num_starved, len(self._queue))[position]
        if isinstance(shown, range):
            return [RequestView(self._queue[i], self._kv) for i in shown]
        return RequestView(self._queue[shown], self._kv)

    @property
    def version(self) -> int:
        """Number that changes whenever a request joins or leaves the queue."""
        return self._queue.version

    @property
    def cache_version(self) -> int:
        """Number that changes whenever a cached_len could have changed."""
        return self._kv.cache.version


class SchedulePolicy(Protocol):
    """Orders waiting requests. Constructed once.

    It may be slow, random or depend on time, because one process decides. It gets time and randomness if its
    constructor names them (`clock`, `rng`): see Port.construct. With a true attribute `preempts`, waiting
    requests take rows and pages from running ones of a lower priority. With a method `key`, the queue is kept
    in that order: see KeyedPolicy.
    """

    def order(self, waiting: WaitingView) -> Sequence[int]:
        """Return positions in `waiting`, in the order in which the requests are considered for admission.

        Called in each step in which requests wait and a row is free. Positions that are left out are not
        considered in this step. An answer that is not a list of distinct positions, or an exception, is
        logged, and the step is scheduled first come, first served.
        """


class KeyedPolicy(ABC):
    """Policy whose order does not change while a request waits. The queue is kept in that order, so that a
    step costs nothing however many requests wait.
    """

    @abstractmethod
    def key(self, request: RequestView) -> float:
        """Return the sort key of a request within its priority: the lowest goes first, equal keys in the
        order of arrival. Called when the request arrives, and again after a retraction. An exception, or
        anything but a number, is logged and counts as 0.
        """

    def order(self, waiting: WaitingView) -> Sequence[int]:
        return range(len(waiting))


class InvalidOrder(Exception):
    """The answer of a policy is not an order."""


def sort_key_of(policy: SchedulePolicy, kv: KVCacheManager) -> SortKey:
    """Return the sort key of the waiting queue within a priority: the policy's, or tenants in turns."""
    key = getattr(policy, "key", None)
    if key is None:
        return in_turn

    def checked_key(req: Request) -> float:
        try:
            value = key(RequestView(req, kv))
            if isinstance(value, int | float) and value == value:
                return value
            logger.error("schedule policy: the key %r is not a number; first come, first served", value)
        except Exception:
            # A user's own policy may raise any exception; requests must not suffer for it.
            logger.exception("schedule policy raised; first come, first served")
        return 0

    return checked_key


def checked_order(order: object, num_waiting: int) -> Sequence[int]:
    """Return a policy's answer if it is an order of some of num_waiting positions. Raises InvalidOrder
    otherwise.
    """
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
