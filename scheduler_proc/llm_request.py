"""Views of requests and of the KV cache for a scheduler of the user's own, under the names that
TensorRT-LLM gives them. Read-only: it sees, and answers; it cannot move anything.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TypeAlias

from scheduler_proc.cache.kv_cache_manager import KVCacheManager
from scheduler_proc.core.request import Request


class LlmRequestState(IntEnum):
    """In the order in which a request passes through them, so that a range of them can be tested."""

    UNKNOWN = 0
    CONTEXT_INIT = 10
    """Some of its prompt is still to be computed: it waits, or holds a row and its prompt is under way."""
    GENERATION_IN_PROGRESS = 13
    GENERATION_TO_COMPLETE = 14
    """State of a request whose last token is being computed: it needs no further step."""
    GENERATION_COMPLETE = 20


class LlmRequest:
    """One request that waits or runs."""

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
        """True if it holds a row and pages: only then can it be paused."""
        return self._req.row >= 0

    @property
    def priority(self) -> int:
        """Higher goes first. Above all that can be asked for once it has waited for max_starvation."""
        return self._req.urgency

    @property
    def arrived_s(self) -> float:
        """time.monotonic() when the caller asked."""
        return self._req.arrived_s

    @property
    def orig_prompt_len(self) -> int:
        return self._req.num_prompt

    @property
    def max_new_tokens(self) -> int:
        """Output tokens at which it ends."""
        return self._req.max_len - self._req.num_prompt

    @property
    def num_tokens(self) -> int:
        """Prompt and output that it has by now."""
        return self._req.num_tokens

    @property
    def context_remaining_length(self) -> int:
        """Tokens to compute before it can go on to produce one a step."""
        req = self._req
        return max(0, (req.num_tokens if req.row < 0 else req.num_given) - req.kv_len)

    @property
    def num_pauses(self) -> int:
        """Number of times that the request has lost its row."""
        return self._req.num_retractions


RequestList: TypeAlias = list[LlmRequest]


class KvCacheView:
    """The pool of KV blocks (pages), as a capacity scheduler may count it."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv

    @property
    def tokens_per_block(self) -> int:
        return self._kv.page_size

    def get_max_resource_count(self) -> int:
        """All blocks, whoever holds them."""
        return self._kv.pages.num_pages

    def get_needed_resource_to_completion(self, request: LlmRequest) -> int:
        """Blocks that the request holds at its last token at most, those that it holds already and those that
        it may share with others included.
        """
        num_prompt = request.orig_prompt_len
        return self._kv.most_pages_of(num_prompt, num_prompt + request.max_new_tokens)

    def get_num_free_blocks(self) -> int:
        """Blocks that could be taken now; what only the prefix cache uses counts as free."""
        return self._kv.num_available
