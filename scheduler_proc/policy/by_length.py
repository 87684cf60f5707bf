"""Policies that order requests of a priority by lengths known on arrival. The queue is kept in their order,
so a step costs nothing more however many requests wait.
"""

from __future__ import annotations

from scheduler_proc.policy.base import KeyedPolicy, RequestView


class ShortestFirst(KeyedPolicy):
    """Serves the request with the least to compute first, counting the whole prompt and all output that it
    may produce. This gives the shortest mean time to completion, but a long request may wait as long as
    shorter ones arrive.
    """

    def key(self, request: RequestView) -> int:
        return request.max_len - request.num_output


class LongestOutputFirst(KeyedPolicy):
    """Serves the request with the most output still allowed first, so that long requests do not end up
    running alone.
    """

    def key(self, request: RequestView) -> int:
        return request.num_prompt + request.num_output - request.max_len
