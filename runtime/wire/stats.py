"""Statistics of the scheduler as typed records: of each iteration, and of each request in it.

Fields are those of TensorRT-LLM's executor in Python's spelling; in JSON they have its names
(`iter_latency_ms` is `iterLatencyMS`). An iteration is one step of the model. A record is made when its step
is committed, so counts of requests and pages are those after it. This project says page for TensorRT-LLM's
block.
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
    """Base of statistics records. All counts are 0 or more."""


class KvCacheStats(StatsRecord, frozen=True):
    """Pages of the KV cache after one iteration, which TensorRT-LLM calls blocks. free + used =
    max, always.
    """

    max_num_blocks: int
    free_num_blocks: int
    """Number of pages that a request could get now: free ones, and cached ones that no request uses."""
    used_num_blocks: int
    """Number of pages that running requests hold; 0 at rest."""
    tokens_per_block: int
    alloc_total_blocks: int
    """Number of pages given to requests since the start, new and reused ones."""
    alloc_new_blocks: int
    reused_blocks: int
    """Number of pages found in the cache when requests got their rows, since the start."""
    missed_blocks: int
    """Number of pages of requests' given tokens that were not found in the cache, since the start."""
    cache_hit_rate: float
    """Share of reused pages, reused / (reused + missed), 0.0 to 1.0."""


class InflightBatchingStats(StatsRecord, frozen=True):
    num_scheduled_requests: int
    """Number of requests in this step, context + generation."""
    num_context_requests: int
    num_gen_requests: int
    num_paused_requests: int
    """Number of requests that were retracted and wait for a row."""
    num_ctx_tokens: int
    """Number of requests' given tokens that this step computes, without cached ones."""
    num_recomputed_ctx_tokens: int
    """Number of tokens among num_ctx_tokens that are computed again, or are output, because a request was
    paused or resumed. The others, summed over a request's life, are its prompt less its cached tokens.
    """
    micro_batch_id: int
    """Number of the step within a pipeline, counting from 0 to the number of stages less one."""
    avg_num_decoded_tokens_per_iter: float
    """Output tokens of this step for each request that was to get one. Below 1.0 if some had ended before it
    was computed.
    """


class StaticBatchingStats(StatsRecord, frozen=True):
    """Figures of a whole static batch, from the step that opens it to its last one."""

    num_scheduled_requests: int
    num_context_requests: int
    """Number of requests of the batch, each of which is in its context phase once."""
    num_ctx_tokens: int
    num_gen_tokens: int
    empty_gen_slots: int
    """Sum over its requests of (output of the longest - own output), in tokens."""


class SpecDecodingStats(StatsRecord, frozen=True):
    """Figures of a step in which guesses were verified."""

    num_draft_tokens: int
    num_accepted_tokens: int
    """Number of accepted guesses among the verified ones."""
    num_requests_with_draft_tokens: int
    acceptance_length: float
    """Output tokens of each of these requests: accepted guesses, and one more."""
    iter_latency_ms: float | None = None
    """Same as `draft_overhead`, because guesses are made while a step is planned and are not timed
    separately.
    """
    draft_overhead: float | None = None


class IterationStats(StatsRecord, frozen=True):
    timestamp: str
    """Local time of the record, as month-day-year hour:minute:second."""
    iter: int
    """Number of the step: 1, 2, ... since the start of the scheduler."""
    iter_latency_ms: float
    """Milliseconds to the step's end from the turn that launched it, or from the end of the step before if
    that is later.
    """
    new_active_requests_queue_latency_ms: float
    """Sum of the milliseconds that the `num_new_active_requests` had waited."""
    num_new_active_requests: int
    """Number of requests that got a row for the first time."""
    num_active_requests: int
    """Number of requests that were admitted and have not finished, paused ones included."""
    num_queued_requests: int
    """Number of requests that were never admitted so far."""
    num_completed_requests: int
    """Number of requests that ended since the last record, for any reason, including those that never got a
    row.
    """
    max_num_active_requests: int
    max_batch_size_static: int
    """Number of rows of the launch."""
    max_batch_size_tuner_recommended: int
    """Batch size that a tuner recommends; always 0, since there is no tuner."""
    max_batch_size_runtime: int
    """Maximum number of requests in one step."""
    max_num_tokens_static: int
    max_num_tokens_tuner_recommended: int
    """Number of tokens of a step that a tuner recommends; always 0, since there is no tuner."""
    max_num_tokens_runtime: int
    """Maximum number of tokens in one step."""
    gpu_mem_usage: int | None
    """Bytes of device memory in use; 0 on a CPU; None if only the worker can measure it, as on a GPU."""
    cpu_mem_usage: int
    """Resident bytes of the scheduler's process, at most a second old. On a CPU the worker is another
    process.
    """
    pinned_mem_usage: int | None
    """Bytes of pinned memory in use; see `gpu_mem_usage`."""
    kv_cache_stats: KvCacheStats
    cross_kv_cache_stats: None = None
    """Always None: no model with an encoder is supported."""
    static_batching_stats: StaticBatchingStats | None = None
    """Figures of a static batch, in the record of its last step; None with any other batching."""
    inflight_batching_stats: InflightBatchingStats | None = None
    """Figures of the step with in-flight batching; None with static batching."""
    spec_dec_stats: SpecDecodingStats | None = None
    """Figures of guesses, if the step verified some."""


class RequestStats(StatsRecord, frozen=True):
    """Figures of one sequence after one iteration."""

    id: int
    """Number that the scheduler gave to the sequence."""
    request_id: int | None
    """Id of its request (`GenerationRequest.id`) if it belongs to the asker; None for other clients'
    requests.
    """
    sequence_index: int
    stage: Stage
    """QUEUED before its first row and while it is paused; COMPLETE in its last record."""
    context_prefill_position: int
    """Number of prompt tokens that are in the KV cache, or that launched steps write."""
    num_generated_tokens: int
    avg_num_decoded_tokens_per_iter: float
    """Output tokens for each step that produced some; 0.0 before the first."""
    scheduled: bool
    """True if the sequence was in this step."""
    paused: bool
    """True if the sequence was retracted and waits for a row."""
    alloc_total_blocks_per_request: int
    """Number of pages of the sequence's row."""
    alloc_new_blocks_per_request: int
    reused_blocks_per_request: int
    """Number of its prompt's pages that were cached when it first got a row."""
    missed_blocks_per_request: int
    """Number of its prompt's pages that were not cached when it first got a row."""
    kv_cache_hit_rate_per_request: float
    """Share of reused pages, reused / (reused + missed), 0.0 to 1.0."""
    dis_serving_stats: None = None
    """Always None: the same engine computes prompts and outputs."""


class RequestStatsPerIteration(StatsRecord, frozen=True):
    iter: int
    request_stats: tuple[RequestStats, ...]


class IterationStatsPage(StatsRecord, frozen=True):
    """Answer of the scheduler: the oldest records that it has of iterations after the one asked for."""

    records: tuple[IterationStats, ...]
    num_dropped: int
    """Number of iterations after the one asked for that are no longer kept."""
    newest: int
    """Number of the last iteration; 0 before the first. If it is in `records` there are no more. It is lower
    than the one asked for if the scheduler was restarted.
    """


class RequestStatsPage(StatsRecord, frozen=True):
    """Answer like IterationStatsPage, with records of requests."""

    records: tuple[RequestStatsPerIteration, ...]
    num_dropped: int
    newest: int


def timestamp(seconds: float) -> str:
    """Format `seconds` since 1970 as in records."""
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
