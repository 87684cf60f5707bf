"""Policies that order by what is known of a request when it comes, within a priority.

The queue is kept in their order, so thousands may wait and a step costs nothing more.
"""

from __future__ import annotations

from scheduler_proc.policy.base import KeyedPolicy, RequestView


class ShortestFirst(KeyedPolicy):
    """The least left to compute first, counting the whole prompt and all the output it may ask for: the mean
    time to the end is shortest, and a long request may wait for as long as shorter ones come.
    """

    def key(self, request: RequestView) -> int:
        return request.max_len - request.num_output


class LongestOutputFirst(KeyedPolicy):
    """The most output still allowed first: long requests do not end up running alone."""

    def key(self, request: RequestView) -> int:
        return request.num_prompt + request.num_output - request.max_len
