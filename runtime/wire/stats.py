"""Statistics of the scheduler, as typed records: of each iteration, and of each request in it.

The fields are those of TensorRT-LLM's executor, in Python's spelling; as JSON they have its names
(`iter_latency_ms` is `iterLatencyMS`). An iteration is one step of the model. A record is made when its step
is committed, so counts of requests and pages are those after it. The word page is the project's for block.
"""

from __future__ import annotations

import re
import time
from typing import Any, Literal, TypeAlias

import msgspec

TIMESTAMP_FORMAT = "%m-%d-%Y %H:%M:%S"
Stage: TypeAlias = Literal["QUEUED", "CONTEXT_IN_PROGRESS", "GENERATION_IN_PROGRESS", "GENERATION_COMPLETE"]


def json_name(field: str) -> str:
    """Return the name of a field in JSON: `iter_latency_ms` → `iterLatencyMS`."""
    camel = re.sub(r"_([a-z])", lambda found: found[1].upper(), field)
    return camel[:-2] + "MS" if field.endswith("_ms") else camel


class StatsRecord(msgspec.Struct, frozen=True, rename=json_name, gc=False):
    """Base of the records of statistics. All counts are 0 or more."""


class KvCacheStats(StatsRecord, frozen=True):
    """Pages of the KV cache in one iteration, which TensorRT-LLM calls blocks. Free + used = max, always."""

    max_num_blocks: int
    free_num_blocks: int
    """Pages that a request could get now: free ones, and cached ones that nobody uses."""
    used_num_blocks: int
    """Pages that running requests hold; 0 at rest."""
    tokens_per_block: int
    alloc_total_blocks: int
    """Pages given to requests since the start, new ones and reused ones."""
    alloc_new_blocks: int
    reused_blocks: int
    """Pages found in the cache when a request was given its row, since the start."""
    missed_blocks: int
    """Pages of the tokens that requests came to their rows with, and that were not found."""
    cache_hit_rate: float
    """Share of reused pages, reused / (reused + missed), 0.0 to 1.0."""


class InflightBatchingStats(StatsRecord, frozen=True):
    num_scheduled_requests: int
    """Requests in this step, context + generation."""
    num_context_requests: int
    num_gen_requests: int
    num_paused_requests: int
    """Requests that have lost their row and wait for another one."""
    num_ctx_tokens: int
    """Tokens computed in this step of what requests came to their rows with, without what was in the cache.
    """
    num_recomputed_ctx_tokens: int
    """Tokens among num_ctx_tokens that are computed again, or are output, because a request was paused or
    resumed. The rest, summed over a request's life, is its prompt - its cached tokens.
    """
    micro_batch_id: int
    """Number of the step among those of a pipeline, which take turns: 0 to one less than it has stages."""
    avg_num_decoded_tokens_per_iter: float
    """Output tokens of this step for each request that was to get one. Below 1.0 where some had ended
    before it was computed.
    """


class StaticBatchingStats(StatsRecord, frozen=True):
    """Figures of a whole batch, from the step that opens it to its last one."""

    num_scheduled_requests: int
    num_context_requests: int
    """Requests of the batch, each of which is in its context phase once."""
    num_ctx_tokens: int
    num_gen_tokens: int
    empty_gen_slots: int
    """Sum over its requests of (output of the longest - own output), in tokens."""


class SpecDecodingStats(StatsRecord, frozen=True):
    """Figures of a step in which guesses were verified."""

    num_draft_tokens: int
    num_accepted_tokens: int
    """Guesses that were right, among those that were verified."""
    num_requests_with_draft_tokens: int
    acceptance_length: float
    """Output tokens of each of these requests: right guesses, and one more."""
    iter_latency_ms: float | None = None
    """Same as `draft_overhead`: guesses are made while a step is planned, which is not told apart."""
    draft_overhead: float | None = None


class IterationStats(StatsRecord, frozen=True):
    timestamp: str
    """Local time of the record, as month-day-year hour:minute:second."""
    iter: int
    """Number of the step: 1, 2, ... from the start of the scheduler."""
    iter_latency_ms: float
    """Milliseconds from the turn that launched the step, or from the end of the step before if that is later,
    to its end.
    """
    new_active_requests_queue_latency_ms: float
    """Milliseconds that the `num_new_active_requests` had waited, added up."""
    num_new_active_requests: int
    """Requests that got a row for the first time."""
    num_active_requests: int
    """Requests admitted and not finished, paused ones included."""
    num_queued_requests: int
    """Requests that were never admitted so far."""
    num_completed_requests: int
    """Requests ended since the record before, for whatever reason, also those that never got a row."""
    max_num_active_requests: int
    max_batch_size_static: int
    """Rows that the launch has."""
    max_batch_size_tuner_recommended: int
    """Batch size that a tuner recommends, which is 0: there is no tuner."""
    max_batch_size_runtime: int
    """Most requests in one step."""
    max_num_tokens_static: int
    max_num_tokens_tuner_recommended: int
    """Tokens of a step that a tuner recommends, which is 0: there is no tuner."""
    max_num_tokens_runtime: int
    """Most tokens in one step."""
    gpu_mem_usage: int | None
    """Bytes of the device's memory in use; None where the scheduler cannot see them: a GPU's belong to the
    worker. 0 on a CPU.
    """
    cpu_mem_usage: int
    """Resident bytes of the scheduler's process, at most a second old. On a CPU the worker is another one."""
    pinned_mem_usage: int | None
    """Same as `gpu_mem_usage`."""
    kv_cache_stats: KvCacheStats
    cross_kv_cache_stats: None = None
    """Always None: nothing that is served has an encoder."""
    static_batching_stats: StaticBatchingStats | None = None
    """Figures of a static batch, in the record of its last step; None with any other batching."""
    inflight_batching_stats: InflightBatchingStats | None = None
    """Figures of the step with in-flight batching; None with static batching."""
    spec_dec_stats: SpecDecodingStats | None = None
    """Figures of a step in which guesses were verified."""


class RequestStats(StatsRecord, frozen=True):
    """Figures of one sequence after one iteration."""

    id: int
    """Number that the scheduler gave the sequence."""
    request_id: int | None
    """Id of its request, `GenerationRequest.id`, if it is the asker's own; None for those of other clients.
    """
    sequence_index: int
    stage: Stage
    """QUEUED before its first row and while it is paused; COMPLETE in one record, its last."""
    context_prefill_position: int
    """Prompt tokens that are in the KV cache, or are written by steps that are launched."""
    num_generated_tokens: int
    avg_num_decoded_tokens_per_iter: float
    """Output tokens for each step that gave it some; 0.0 before the first."""
    scheduled: bool
    """True if the sequence was in this step."""
    paused: bool
    """True if the sequence has lost its row and waits for another one."""
    alloc_total_blocks_per_request: int
    """Pages of the sequence's row."""
    alloc_new_blocks_per_request: int
    reused_blocks_per_request: int
    """Pages of its prompt that were in the cache when it first got a row."""
    missed_blocks_per_request: int
    """Pages of the sequence's prompt that were not in the cache when it first got a row."""
    kv_cache_hit_rate_per_request: float
    """Share of reused pages, reused / (reused + missed), 0.0 to 1.0."""
    dis_serving_stats: None = None
    """Always None: prompts and outputs are computed by the same engine."""


class RequestStatsPerIteration(StatsRecord, frozen=True):
    iter: int
    request_stats: tuple[RequestStats, ...]


class IterationStatsPage(StatsRecord, frozen=True):
    """An answer of the scheduler: the oldest records that are kept of iterations after the one asked for."""

    records: tuple[IterationStats, ...]
    num_dropped: int
    """Iterations after the one asked for that are no longer kept."""
    newest: int
    """Number of the last iteration, 0 before the first: with that in `records` there is nothing more to ask
    for. Lower than the one asked for when the scheduler was started again.
    """


class RequestStatsPage(StatsRecord, frozen=True):
    """An answer like IterationStatsPage, with records of requests."""

    records: tuple[RequestStatsPerIteration, ...]
    num_dropped: int
    newest: int


def timestamp(seconds: float) -> str:
    """Return `seconds` since 1970 as a record shows them."""
    return time.strftime(TIMESTAMP_FORMAT, time.localtime(seconds))


def batch_manager_record(stats: IterationStats) -> dict[str, Any]:
    """Return an iteration under the names of TensorRT-LLM's batch manager."""
    kv = stats.kv_cache_stats
    record: dict[str, Any] = {
        "Timestamp": stats.timestamp,
        "Iteration Counter": stats.iter,
        "Active Request Count": stats.num_active_requests,
        "Max Request Count": stats.max_num_active_requests,
        "Max KV cache blocks": kv.max_num_blocks,
        "Free KV cache blocks": kv.free_num_blocks,
        "Used KV cache blocks": kv.used_num_blocks,
        "Tokens per KV cache block": kv.tokens_per_block,
    }
    inflight, static = stats.inflight_batching_stats, stats.static_batching_stats
    if inflight is not None:
        record |= {
            "Scheduled Requests": inflight.num_scheduled_requests,
            "Context Requests": inflight.num_context_requests,
            "Generation Requests": inflight.num_gen_requests,
            "Total Context Tokens": inflight.num_ctx_tokens,
            "MicroBatch ID": inflight.micro_batch_id,
        }
    if static is not None:
        record |= {
            "Scheduled Requests": static.num_scheduled_requests,
            "Context Requests": static.num_context_requests,
            "Total Generation Tokens": static.num_gen_tokens,
            "Total Context Tokens": static.num_ctx_tokens,
            "Empty Generation Slots": static.empty_gen_slots,
        }
    return record
