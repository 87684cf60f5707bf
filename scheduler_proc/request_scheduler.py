"""Base classes for schedulers of the user's own, named and called as in TensorRT-LLM. A CapacityScheduler
chooses which requests get resources, a MicroBatchScheduler which of those are in the next forward, and a
RequestScheduler does both.

Each is called once a step, and its answer is checked (see ChosenBatch). docs/adding_a_policy.md has examples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from scheduler_proc.llm_request import KvCacheView, LlmRequest, LlmRequestState, RequestList

__all__ = [
    "CapacityScheduler",
    "KvCacheView",
    "LlmRequest",
    "LlmRequestState",
    "MicroBatchScheduler",
    "RequestList",
    "RequestScheduler",
    "SchedulerOutput",
    "SimpleScheduler",
]


class CapacityScheduler(ABC):
    """Chooses which requests get resources. Constructed as Class(max_num_requests, kv_cache_manager:
    KvCacheView).
    """

    @abstractmethod
    def schedule_request(self, active_requests: RequestList) -> tuple[RequestList, RequestList]:
        """Return (fitting_requests, paused_requests). active_requests: all running requests in the order of
        admission, then all waiting ones in the order of the schedule policy.

        Waiting requests that fit get rows in the order of the answer, until the prompt of one has no room
        now. Running requests that fit continue. A paused request loses its row and resumes later with the
        tokens that it has. Requests in neither list stay as they are.
        """


class MicroBatchScheduler(ABC):
    """Chooses which requests are in the next forward. Constructed as
    Class(max_batch_size, max_num_tokens).
    """

    @abstractmethod
    def schedule(
        self, active_requests: RequestList, inflight_request_ids: set[int]
    ) -> tuple[RequestList, RequestList]:
        """Return (context_requests, generation_requests), disjoint, from those that fit.

        inflight_request_ids: requests in a forward whose result is needed first; they must not be chosen.
        Prompts get what decodes leave of max_num_tokens, in chunks if necessary.
        """


class SchedulerOutput(NamedTuple):
    context_requests: RequestList
    generation_requests: RequestList
    paused_requests: RequestList


class RequestScheduler(ABC):
    """Makes both decisions. Constructed as Class(max_num_requests, kv_cache_manager, max_batch_size,
    max_num_tokens).
    """

    @abstractmethod
    def schedule_request(
        self, active_requests: RequestList, inflight_request_ids: set[int]
    ) -> SchedulerOutput | tuple[RequestList, RequestList, RequestList]:
        """Return the answers of CapacityScheduler and MicroBatchScheduler together."""


class SimpleScheduler(RequestScheduler):
    """Combines a capacity scheduler and a micro-batch scheduler, which it asks in this order."""

    def __init__(
        self, capacity_scheduler: CapacityScheduler, micro_batch_scheduler: MicroBatchScheduler
    ) -> None:
        self.capacity_scheduler = capacity_scheduler
        self.micro_batch_scheduler = micro_batch_scheduler

    def schedule_request(
        self, active_requests: RequestList, inflight_request_ids: set[int]
    ) -> SchedulerOutput:
        """Ask both schedulers. Raises InvalidSchedule if an answer of either is invalid."""
        answer = self.capacity_scheduler.schedule_request(active_requests)
        fitting, paused = checked_lists("capacity scheduler", answer, active_requests, ("fitting", "paused"))
        answer = self.micro_batch_scheduler.schedule(fitting, inflight_request_ids)
        context, generation = checked_lists(
            "micro-batch scheduler", answer, fitting, ("context", "generation")
        )
        return SchedulerOutput(context, generation, paused)


class EverybodyFits(CapacityScheduler):
    """Lets every request fit, and so leaves that decision to the capacity policy that admits them."""

    def schedule_request(self, active_requests: RequestList) -> tuple[RequestList, RequestList]:
        return active_requests, []


class EverybodyTakesPart(MicroBatchScheduler):
    """Lets every request take part, decodes first, and so leaves that decision to the batching type."""

    def __init__(self, max_batch_size: int, max_num_tokens: int) -> None:
        self._max_batch_size = max_batch_size

    def schedule(
        self, active_requests: RequestList, inflight_request_ids: set[int]
    ) -> tuple[RequestList, RequestList]:
        there = [request for request in active_requests if request.request_id not in inflight_request_ids]
        context = [request for request in there if request.state is LlmRequestState.CONTEXT_INIT]
        generation = [request for request in there if request.state is not LlmRequestState.CONTEXT_INIT]
        generation = generation[: self._max_batch_size]
        return context[: self._max_batch_size - len(generation)], generation


class InvalidSchedule(Exception):
    """The answer of a scheduler cannot be carried out; the message says why."""


def checked_lists(
    who: str, answer: object, given: RequestList, names: Sequence[str]
) -> tuple[RequestList, ...]:
    """Return the lists of a scheduler's answer. Raises InvalidSchedule unless there are as many as names, and
    each request in them was given and is in one list only.
    """
    if not isinstance(answer, tuple | list) or len(answer) != len(names):
        raise InvalidSchedule(f"the {who} must answer with {len(names)} lists: {', '.join(names)}")
    allowed = {id(request) for request in given}
    for name, requests in zip(names, answer, strict=True):
        if not isinstance(requests, Sequence):
            raise InvalidSchedule(f"the {who}: {name} requests must be a list, not {type(requests).__name__}")
        for request in requests:
            if id(request) not in allowed:
                raise InvalidSchedule(
                    f"the {who}: {request!r} of {name} was not given to it, or is there twice"
                )
            allowed.remove(id(request))
    return tuple(list(requests) for requests in answer)
