"""Schedulers of the user's own: which requests get resources (CapacityScheduler), which of those are in the
next forward (MicroBatchScheduler), or both at once (RequestScheduler). Named and called as in TensorRT-LLM.

One call of each a step. What they answer is checked: see ChosenBatch. docs/adding_a_policy.md has examples.
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
    """Decides who gets resources. Constructed as Class(max_num_requests, kv_cache_manager: KvCacheView)."""

    @abstractmethod
    def schedule_request(self, active_requests: RequestList) -> tuple[RequestList, RequestList]:
        """(fitting_requests, paused_requests) of all that run, in the order of admission, and all that wait,
        in the order of the schedule policy.

        Who waits and fits gets a row if its prompt has room now, in the order of the answer, until one has
        not. Who runs and fits goes on. Who is paused loses its row and resumes later, with the tokens it has.
        Who is in neither list stays as it is.
        """


class MicroBatchScheduler(ABC):
    """Decides who is in the next forward. Constructed as Class(max_batch_size, max_num_tokens)."""

    @abstractmethod
    def schedule(
        self, active_requests: RequestList, inflight_request_ids: set[int]
    ) -> tuple[RequestList, RequestList]:
        """(context_requests, generation_requests), disjoint, of those that fit.

        inflight_request_ids: who is in a forward whose result must come first; they are not to be chosen.
        Prompts get what the decodes leave of max_num_tokens, in chunks if need be.
        """


class SchedulerOutput(NamedTuple):
    context_requests: RequestList
    generation_requests: RequestList
    paused_requests: RequestList


class RequestScheduler(ABC):
    """Both decisions at once. Constructed as Class(max_num_requests, kv_cache_manager, max_batch_size,
    max_num_tokens).
    """

    @abstractmethod
    def schedule_request(
        self, active_requests: RequestList, inflight_request_ids: set[int]
    ) -> SchedulerOutput | tuple[RequestList, RequestList, RequestList]:
        """Return what CapacityScheduler and MicroBatchScheduler do, one after the other."""


class SimpleScheduler(RequestScheduler):
    """First who fits, then who of them is in the forward."""

    def __init__(
        self, capacity_scheduler: CapacityScheduler, micro_batch_scheduler: MicroBatchScheduler
    ) -> None:
        self.capacity_scheduler = capacity_scheduler
        self.micro_batch_scheduler = micro_batch_scheduler

    def schedule_request(
        self, active_requests: RequestList, inflight_request_ids: set[int]
    ) -> SchedulerOutput:
        """Ask both schedulers. Raises InvalidSchedule when one of the two answers with something else than it
        may.
        """
        answer = self.capacity_scheduler.schedule_request(active_requests)
        fitting, paused = checked_lists("capacity scheduler", answer, active_requests, ("fitting", "paused"))
        answer = self.micro_batch_scheduler.schedule(fitting, inflight_request_ids)
        context, generation = checked_lists(
            "micro-batch scheduler", answer, fitting, ("context", "generation")
        )
        return SchedulerOutput(context, generation, paused)


class EverybodyFits(CapacityScheduler):
    """Leaves who fits to the capacity policy that admits them."""

    def schedule_request(self, active_requests: RequestList) -> tuple[RequestList, RequestList]:
        return active_requests, []


class EverybodyTakesPart(MicroBatchScheduler):
    """Leaves the rest to the batching type. Decodes first."""

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
    """A scheduler answered with something that cannot be done; the message says what."""


def checked_lists(
    who: str, answer: object, given: RequestList, names: Sequence[str]
) -> tuple[RequestList, ...]:
    """The lists that a scheduler answered with, if there are as many as names, and each of their requests was
    given to it and stands in one of them only. Raises InvalidSchedule.
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
