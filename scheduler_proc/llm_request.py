"""Read-only views of requests and of the KV cache, for schedulers of the user's own, under TensorRT-LLM's
names. Such a scheduler can choose, but not change anything.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TypeAlias

from scheduler_proc.cache.kv_cache_manager import KVCacheManager
from scheduler_proc.core.request import Request


class LlmRequestState(IntEnum):
    """States of a request, numbered in the order in which it passes through them, so that ranges can be
    compared.
    """

    UNKNOWN = 0
    CONTEXT_INIT = 10
    """Part of its prompt is still to be computed: it waits, or holds a row and its prompt is being computed.
    """
    GENERATION_IN_PROGRESS = 13
    GENERATION_TO_COMPLETE = 14
    """Its last token is being computed: it needs no further step."""
    GENERATION_COMPLETE = 20


class LlmRequest:
    """A waiting or running request."""

    __slots__ = ("_req",)

    def __init__(self, req: Request) -> None:
        self._req = req

    def __repr__(self) -> str:
        return f"LlmRequest({self.request_id}, {self.state.name})"

    @property
    def request_id(self) -> int:
        """Number of the request in the order of arrival."""
        return self._req.seq

    @property
    def state(self) -> LlmRequestState:
        req = self._req
        if req.finished:
            return LlmRequestState.GENERATION_COMPLETE
        if req.row < 0 or req.kv_len < req.num_given:
            return LlmRequestState.CONTEXT_INIT
        if req.predicted_len >= req.max_len:
            return LlmRequestState.GENERATION_TO_COMPLETE
        return LlmRequestState.GENERATION_IN_PROGRESS

    @property
    def has_row(self) -> bool:
        """True if it holds a row and pages. Only then can it be paused."""
        return self._req.row >= 0

    @property
    def priority(self) -> int:
        """Scheduling priority; higher goes first. A request that has waited for max_starvation has a priority
        above all that can be asked for.
        """
        return self._req.urgency

    @property
    def arrived_s(self) -> float:
        """Time at which the caller asked, on the clock of time.monotonic()."""
        return self._req.arrived_s

    @property
    def orig_prompt_len(self) -> int:
        return self._req.num_prompt

    @property
    def max_new_tokens(self) -> int:
        """Number of output tokens at which it ends."""
        return self._req.max_len - self._req.num_prompt

    @property
    def num_tokens(self) -> int:
        """Current number of tokens, prompt and output."""
        return self._req.num_tokens

    @property
    def context_remaining_length(self) -> int:
        """Number of tokens to compute before it can produce one in each step."""
        req = self._req
        return max(0, (req.num_tokens if req.row < 0 else req.num_given) - req.kv_len)


RequestList: TypeAlias = list[LlmRequest]


class KvCacheView:
    """Pool of KV blocks (pages), with the counts that a capacity scheduler needs."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv

    @property
    def tokens_per_block(self) -> int:
        return self._kv.page_size

    def get_max_resource_count(self) -> int:
        """Return the number of all blocks, whoever holds them."""
        return self._kv.pages.num_pages

    def get_needed_resource_to_completion(self, request: LlmRequest) -> int:
        """Return the most blocks that the request holds until its last token, including those that it holds
        already or may share with others.
        """
        num_prompt = request.orig_prompt_len
        return self._kv.most_pages_of(num_prompt, num_prompt + request.max_new_tokens)

    def get_num_free_blocks(self) -> int:
        """Return the number of blocks that could be taken now. Blocks that only the prefix cache uses count
        as free.
        """
        return self._kv.num_available
