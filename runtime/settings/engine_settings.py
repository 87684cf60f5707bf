"""Settings of the KV cache and of the scheduler."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from runtime.settings.model_settings import RecordedStepSettings
from runtime.settings.setting import setting


class KVCacheSettings(RecordedStepSettings, frozen=True, forbid_unknown_fields=True):
    """Settings of the KV cache: its size and retention."""

    TITLE: ClassVar[str] = "KV cache"

    max_total_tokens: Annotated[
        int,
        setting(
            "cap of the KV cache in tokens, rounded up to pages; 0: by memory alone, on a CPU an eighth of "
            "it and 8 GiB at most",
            ge=0,
            le=1 << 30,
        ),
    ] = 0
    mem_fraction_static: Annotated[
        float,
        setting(
            "share of free memory for the KV cache",
            *("--gpu-memory-utilization", "--kv-cache-free-gpu-memory-fraction"),
            *("--free-gpu-memory-fraction",),
            gt=0.0,
            lt=1.0,
        ),
    ] = 0.85
    page_size: Annotated[int, setting("tokens per KV page", "--block-size", ge=1, le=256)] = 16
    disable_radix_cache: Annotated[
        bool, setting("do not keep KV of earlier requests", "--no-enable-prefix-caching")
    ] = False
    radix_eviction_policy: Annotated[
        str,
        setting(
            "what of the KV of earlier requests goes first: lru, lfu, fifo, filo, mru, priority, slru, or "
            "your own as package.module:Class"
        ),
    ] = "lru"
    max_attention_window: Annotated[
        int,
        setting(
            "tokens that a token sees in every layer, itself included, or the layer's own window if that is "
            "smaller: it changes what a longer text gives; 0: as the model's config says",
            ge=0,
            le=1 << 30,
        ),
    ] = 0


class SchedulerSettings(KVCacheSettings, frozen=True, forbid_unknown_fields=True):
    """Settings of the scheduler: order, admission and size of steps."""

    TITLE: ClassVar[str] = "scheduler"

    max_running_requests: Annotated[
        int, setting("requests that run at the same time (rows)", "--max-num-seqs", ge=1, le=4096)
    ] = 256
    max_beam_width: Annotated[
        int,
        setting(
            "beams of a request that searches, at most: each takes a row; 1: no request may", ge=1, le=64
        ),
    ] = 1
    beam_defaults: Annotated[
        Literal["transformers", "trtllm"],
        setting(
            "what a search takes that does not say it: transformers is length_penalty 1, early_stopping "
            "false; trtllm is 0 and true"
        ),
    ] = "transformers"
    beam_batching: Annotated[
        Literal["mixed", "drain"],
        setting(
            "requests of several beam widths: mixed shares steps among them; drain starts all requests in "
            "the order of their arrival, another width when all before it have ended"
        ),
    ] = "mixed"
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
    max_starvation: Annotated[
        float,
        setting(
            "seconds that a request waits behind others of higher priority, at most; then it goes before all "
            "but those that have waited as long; 0: as long as there are any",
            ge=0.0,
            le=86400.0,
        ),
    ] = 30.0
    queue_timeout: Annotated[
        float,
        setting(
            "seconds after which a request that has not begun is refused with 503; pauses and restarts do "
            "not count; 0: never, which is the default of LLM",
            ge=0.0,
            le=86400.0,
        ),
    ] = 600.0
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
    disable_chunked_prefill: Annotated[
        bool,
        setting(
            "compute each prompt whole, in one step; one of more than chunked_prefill_size tokens is refused",
            "--no-enable-chunked-prefill",
        ),
    ] = False
    enable_dynamic_chunking: Annotated[
        bool,
        setting(
            "later chunks of a long prompt have fewer tokens, so that each takes about as long as the first; "
            "for pipeline stages, and for streams beside long prompts (docs/pipeline_parallel.md)"
        ),
    ] = False
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
    grammar_backend: Annotated[
        str,
        setting(
            "what keeps output to a JSON schema, a regular expression or a grammar "
            "(docs/structured_output.md): auto, llguidance, xgrammar (needs carousel[xgrammar]), your own as "
            "package.module:Class, or none: a request that asks for it is refused; auto: llguidance where "
            "text is generated",
            "--guided-decoding-backend",
        ),
    ] = "auto"
    logits_processor: Annotated[
        str,
        setting(
            "logits processors that requests may name, like bias=my_package.processors:Bias; the one called "
            "batched is called once a step (docs/logits_processors.md)"
        ),
    ] = ""
    disable_logits_processor_replicate: Annotated[
        bool, setting("call logits processors on tensor-parallel rank 0 alone, not on every rank")
    ] = False
    worker_extension_cls: Annotated[
        str,
        setting(
            "class whose methods collective_rpc calls on the model worker's ranks, like "
            "my_package.debug:Probe (docs/collective_rpc.md)"
        ),
    ] = ""
    speculative_algorithm: Annotated[
        Literal["none", "NGRAM"],
        setting(
            "who guesses the next tokens, which one step then verifies, with the same output: none; NGRAM, "
            "from what stands in prompt and output (docs/speculation.md)"
        ),
    ] = "none"
    speculative_num_draft_tokens: Annotated[
        int,
        setting(
            "guesses of one request in a step, at most",
            "--num-speculative-tokens",
            "--spec-tokens",
            ge=1,
            le=64,
        ),
    ] = 4
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
