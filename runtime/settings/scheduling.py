"""The scheduler: who runs, in which order, in how large steps."""

from __future__ import annotations

from typing import Annotated, Literal

from runtime.settings.kv_cache import KVCacheSettings
from runtime.settings.setting import setting


class SchedulingSettings(KVCacheSettings, frozen=True, forbid_unknown_fields=True):
    max_running_requests: Annotated[
        int, setting("requests that run at the same time (rows)", "--max-num-seqs", ge=1, le=4096)
    ] = 256
    max_queued_requests: Annotated[
        int,
        setting(
            "requests that may wait; more are refused with 503; 0: four times the rows", ge=0, le=1 << 20
        ),
    ] = 0
    max_queued_requests_per_client: Annotated[
        int,
        setting(
            "of those, how many may be one client's: a connection of the client library, or an HTTP server "
            "process; less where several have many, so that others find room; 0: three quarters, and all "
            "where no other is connected",
            ge=0,
            le=1 << 20,
        ),
    ] = 0
    chunked_prefill_size: Annotated[
        int,
        setting(
            "tokens computed in one step, at most",
            "--max-num-batched-tokens",
            "--max-num-tokens",
            ge=1,
            le=1 << 20,
        ),
    ] = 2048
    max_batch_size: Annotated[
        int, setting("requests computed in one step, at most; 0: all that run", ge=0, le=4096)
    ] = 0
    batching_type: Annotated[
        Literal["inflight_fused", "inflight", "static", "InflightFusedBatching", "InflightBatching", "V1"],
        setting(
            "what one step is made of: prompts and decodes (inflight_fused), one or the other (inflight), or "
            "a batch that is closed until its last request has ended (static); docs/batching.md",
            "--model-type",
        ),
    ] = "inflight_fused"
    capacity_scheduler: Annotated[
        str,
        setting(
            "who fits: max_utilization (pauses requests when the KV cache is full), guaranteed_no_evict "
            "(never does), static_batch (nor lets anybody join), or your own as package.module:Class; auto: "
            "max_utilization, with static batching static_batch",
            "--capacity-scheduler-policy",
        ),
    ] = "auto"
    micro_batch_scheduler: Annotated[
        str,
        setting(
            "who of those that fit is in the next step: your own as package.module:Class; default: all of "
            "them, within the limits of a step"
        ),
    ] = ""
    request_scheduler: Annotated[
        str,
        setting("in place of capacity scheduler and micro-batch scheduler: your own as package.module:Class"),
    ] = ""
    schedule_policy: Annotated[
        str,
        setting(
            "order of the waiting queue: fcfs, priority, lpm, dfs-weight, shortest-first, lof, random, or "
            "your own as package.module:Class",
            "--scheduling-policy",
        ),
    ] = "fcfs"
    schedule_conservativeness: Annotated[
        float, setting("above 1: admit later and retract less; below 1: the reverse", gt=0.0, le=10.0)
    ] = 1.0
    disable_overlap_schedule: Annotated[
        bool, setting("wait for each step before planning the next", "--no-async-scheduling")
    ] = False
    iter_stats_max_iterations: Annotated[
        int, setting("steps of which statistics are kept to be asked for; 0: none", ge=0, le=100_000)
    ] = 1000
    request_stats_max_iterations: Annotated[
        int,
        setting(
            "steps of which statistics of every live request are kept; 0: none, as they cost each step 2 us "
            "for each of them",
            ge=0,
            le=10_000,
        ),
    ] = 0
    decode_log_interval: Annotated[
        int,
        setting(
            "steps between two decode log lines, of which there is one a second at most", ge=1, le=1 << 20
        ),
    ] = 40
