"""SchedulePolicy: the seam for ordering the waiting queue, and the read-only views that a policy is shown.

A policy cannot move state: it sees views and answers with positions. What it answers is checked.
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
    """Facts that a policy may know of a waiting request."""

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
        """Time when the caller asked, by its own account and not later than it came here, as of `clock`."""
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

    def cached_path(self) -> tuple[int, ...]:
        """The nodes of the prefix cache that hold them, from the root down, by number: requests that share a
        prefix share the beginning of it. Walks the cache.
        """
        return self._kv.match_path(self._req)


class WaitingView(Sequence[RequestView]):
    """The waiting queue as a policy sees it: in the order (priority, retracted first, the policy's key if it
    has one, else tenants in turns, arrival), without those that have waited for max_starvation.
    """

    def __init__(self, queue: WaitingQueue, kv: KVCacheManager, num_starved: int = 0) -> None:
        """`num_starved`: the first of the queue, which are not shown."""
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
        """Changes whenever a request joins or leaves the queue."""
        return self._queue.version

    @property
    def cache_version(self) -> int:
        """Changes whenever a cached_len could come out differently."""
        return self._kv.cache.version


class SchedulePolicy(Protocol):
    """Constructed once. May be slow, random or depend on time: one process decides. It gets time and
    randomness if its constructor names them (`clock`, `rng`): see Port.construct.

    With an attribute `preempts` that is true, a waiting request takes rows and pages from running ones of a
    lower priority. With a method `key`, the queue is kept in the order of it: see KeyedPolicy.
    """

    def order(self, waiting: WaitingView) -> Sequence[int]:
        """Positions in `waiting`, in the order in which the requests should be considered for admission.

        Called in each step in which something waits and a row is free. Positions left out are not considered
        in this step. An answer that is not a list of different positions, or an exception, is logged; the
        step is then scheduled first come, first served.
        """


class KeyedPolicy(ABC):
    """A policy whose order does not change while a request waits: the queue is kept in that order, so that a
    step costs nothing however many wait.
    """

    @abstractmethod
    def key(self, request: RequestView) -> float:
        """Return the place of a request within its priority: the lowest first, equal ones as they came. Asked
        when it comes, and once more when it was retracted. Anything but a number, or an exception, is logged
        and counts as 0.
        """

    def order(self, waiting: WaitingView) -> Sequence[int]:
        return range(len(waiting))


class InvalidOrder(Exception):
    """A policy answered with something that is not an order."""


def sort_key_of(policy: SchedulePolicy, kv: KVCacheManager) -> SortKey:
    """Return the key of the waiting queue within a priority: the policy's, or tenants in turns."""
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
            # A user's own policy may raise anything; requests must not suffer for it.
            logger.exception("schedule policy raised; first come, first served")
        return 0

    return checked_key


def checked_order(order: object, num_waiting: int) -> Sequence[int]:
    """Return what a policy answered, if it is an order of some of num_waiting positions. Raises
    InvalidOrder.
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
