"""A capacity scheduler of one's own: the example of TensorRT-LLM's scheduler documentation, imports changed.

    python launch.py --capacity-scheduler examples.guaranteed_no_evict_scheduler:GuaranteedNoEvictScheduler

docs/adding_a_policy.md says when it is called and what becomes of its answer.
"""

from __future__ import annotations

from scheduler_proc.request_scheduler import (
    CapacityScheduler,
    KvCacheView,
    LlmRequest,
    LlmRequestState,
    RequestList,
)


class GuaranteedNoEvictScheduler(CapacityScheduler):
    # only schedule requests has no_schedule_until_state <= state < no_schedule_after_state
    no_schedule_until_state = LlmRequestState.CONTEXT_INIT
    no_schedule_after_state = LlmRequestState.GENERATION_COMPLETE

    def __init__(self, max_num_requests: int, kv_cache_manager: KvCacheView) -> None:
        super().__init__()
        self.max_num_requests = max_num_requests
        self.kv_cache_manager = kv_cache_manager

    def schedule_request(self, active_requests: RequestList) -> tuple[list[LlmRequest], list[LlmRequest]]:
        scheduled_requests: RequestList = []
        pending_requests: RequestList = []
        reserved_blocks = 0
        max_blocks = self.kv_cache_manager.get_max_resource_count()
        for request in active_requests:
            req_state = request.state
            # if request cannot be scheduled yet or request should no longer be scheduled, skip
            if (
                req_state.value < self.no_schedule_until_state.value
                or req_state.value >= self.no_schedule_after_state.value
            ):
                continue
            if len(scheduled_requests) >= self.max_num_requests or reserved_blocks >= max_blocks:
                break
            if req_state in (LlmRequestState.GENERATION_IN_PROGRESS, LlmRequestState.GENERATION_TO_COMPLETE):
                scheduled_requests.append(request)
                reserved_blocks += self.kv_cache_manager.get_needed_resource_to_completion(request)
            else:
                pending_requests.append(request)

        available_blocks = max_blocks - reserved_blocks
        for request in pending_requests:
            if len(scheduled_requests) >= self.max_num_requests:
                break
            if request.state == LlmRequestState.CONTEXT_INIT:
                needed_blocks = self.kv_cache_manager.get_needed_resource_to_completion(request)
                if needed_blocks > available_blocks:
                    # If one request fails to be scheduled, break
                    break
                scheduled_requests.append(request)
                available_blocks -= needed_blocks

        assert len(scheduled_requests) > 0, (
            "no pending request can get enough resource to complete, please increase KV cache pool size."
        )
        return scheduled_requests, []
