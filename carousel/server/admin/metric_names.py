"""Metrics of SGLang and vLLM, and the corresponding ones here. `--metrics-names vllm` emits vLLM's names from
this table, and docs/metrics.md is written from it by

        python -m carousel.server.admin.metric_names
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

How: TypeAlias = Literal["same", "near", "absent"]
DOCS = Path(__file__).resolve().parents[3] / "docs" / "metrics.md"
MARKER = "Written by python -m carousel.server.admin.metric_names"


class PeerMetric(NamedTuple):
    name: str
    """Name without Prometheus' endings (_total, _bucket ...)."""
    how: How
    ours: str = ""
    """Our metric with the same or nearly the same meaning."""
    note: str = ""
    renamed: tuple[tuple[str, str], ...] = ()
    """Labels with another name than in ours."""


def _same(name: str, ours: str, note: str = "", *renamed: tuple[str, str]) -> PeerMetric:
    return PeerMetric(name, "same", ours, note, renamed)


def _near(name: str, ours: str, note: str) -> PeerMetric:
    return PeerMetric(name, "near", ours, note)


def _absent(note: str, *names: str) -> tuple[PeerMetric, ...]:
    return tuple(PeerMetric(name, "absent", note=note) for name in names)


_OF_STREAMS = "streams only: what is not streamed comes all at once"
_AT_END = "counted when a sequence ends, of HTTP requests"
_NOT_SPLIT = "the KV cache is its server's alone"
_BY_TRACE = "of sampled requests: traces and timelines"
_NO_MM = "text only"

VLLM: tuple[PeerMetric, ...] = (
    _same("num_requests_running", "sglang:num_running_reqs"),
    _same("num_requests_waiting", "sglang:num_queue_reqs"),
    _same(
        "kv_cache_usage_perc", "sglang:token_usage", "0 to 1; cached pages that no request uses count as free"
    ),
    _same("num_preemptions", "sglang:num_retracted_requests"),
    _same(
        "request_success",
        "carousel:finished_sequences",
        "of HTTP requests",
        ("finish_reason", "finished_reason"),
    ),
    _same("e2e_request_latency_seconds", "sglang:e2e_request_latency_seconds", "of HTTP requests"),
    _same("request_queue_time_seconds", "sglang:queue_time_seconds"),
    _same("spec_decode_num_drafts", "sglang:spec_decode_num_drafts"),
    _same("spec_decode_num_draft_tokens", "sglang:spec_decode_num_draft_tokens"),
    _same("spec_decode_num_accepted_tokens", "sglang:spec_decode_num_accepted_tokens"),
    _same("spec_decode_num_accepted_tokens_per_pos", "sglang:spec_decode_num_accepted_tokens_per_pos"),
    _near("prompt_tokens", "sglang:prompt_tokens", _AT_END),
    _near("prompt_tokens_cached", "sglang:cached_tokens", _AT_END),
    _near("generation_tokens", "sglang:generation_tokens", _AT_END),
    _near("time_to_first_token_seconds", "sglang:time_to_first_token_seconds", _OF_STREAMS),
    _near("inter_token_latency_seconds", "sglang:inter_token_latency_seconds", _OF_STREAMS),
    _near("time_per_output_token_seconds", "sglang:inter_token_latency_seconds", _OF_STREAMS),
    _near("prefix_cache_queries", "sglang:kv_missed_blocks", "in pages, with sglang:kv_reused_blocks"),
    _near("prefix_cache_hits", "sglang:kv_reused_blocks", "in pages"),
    _near("iteration_tokens_total", "sglang:num_iterations", "sums; each step: /stats/iterations"),
    *_absent(
        _BY_TRACE,
        *("request_inference_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
        *("request_time_per_output_token_seconds", "time_per_prefill_token_request_seconds"),
        *("request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens"),
        *("request_params_n", "request_params_max_tokens"),
    ),
    *_absent("the older name of kv_cache_usage_perc", "gpu_cache_usage_perc"),
    *_absent("older names of prefix_cache_*", "gpu_prefix_cache_queries", "gpu_prefix_cache_hits"),
    *_absent("see /server_info", "cache_config_info", "prompt_tokens_by_source"),
    *_absent("carousel:lora_requests counts by adapter", "lora_requests_info"),
    *_absent(_NO_MM, "mm_cache_queries", "mm_cache_hits"),
    *_absent(_NOT_SPLIT, "external_prefix_cache_queries", "external_prefix_cache_hits"),
    *_absent("generation is paused, never asleep: /ready says so", "engine_sleep_state"),
)
SGLANG: tuple[PeerMetric, ...] = (
    *(
        _same(name, f"sglang:{name}")
        for name in (
            *("num_running_reqs", "num_queue_reqs", "num_used_tokens", "max_total_num_tokens", "token_usage"),
            *("gen_throughput", "num_retracted_requests", "queue_time_seconds"),
        )
    ),
    *(
        _same(name, f"sglang:{name}", "of HTTP requests")
        for name in (
            *("prompt_tokens", "cached_tokens", "generation_tokens"),
            *("num_requests", "num_aborted_requests", "e2e_request_latency_seconds"),
        )
    ),
    _near("time_to_first_token_seconds", "sglang:time_to_first_token_seconds", _OF_STREAMS),
    _near("inter_token_latency_seconds", "sglang:inter_token_latency_seconds", _OF_STREAMS),
    _near("cache_hit_rate", "sglang:cache_hit_rate", "since the start; there of the last batch"),
    _near("spec_accept_length", "sglang:spec_accept_length", "since the start; there lately"),
    _near("evicted_tokens", "sglang:evicted_tokens", "what made room; there what went to the host's memory"),
    _near("spec_accept_rate", "sglang:spec_decode_num_accepted_tokens", "by spec_decode_num_draft_tokens"),
    _near("realtime_tokens", "sglang:context_tokens", "with generation_tokens and cached_tokens"),
    *_absent(_BY_TRACE, "per_stage_req_latency_seconds", "num_retractions"),
    *_absent("see num_retracted_requests", "num_retracted_reqs"),
    *_absent("requests are counted, not tokens", "num_retracted_input_tokens", "num_retracted_output_tokens"),
    *_absent("not counted", "prompt_tokens_histogram", "generation_tokens_histogram", "num_so_requests"),
    *_absent("see the snapshot", "num_grammar_queue_reqs", "num_paused_reqs", "decode_sum_seq_lens"),
    *_absent(
        "guides are not counted",
        *("grammar_compilation_time_seconds", "num_grammar_cache_hit", "num_grammar_aborted"),
        *("num_grammar_timeout", "num_grammar_total", "grammar_schema_count", "grammar_ebnf_size"),
        *("grammar_tree_traversal_time_avg", "grammar_tree_traversal_time_max"),
    ),
    *_absent(
        _NOT_SPLIT,
        *("num_prefill_prealloc_queue_reqs", "num_prefill_inflight_queue_reqs"),
        *("num_decode_prealloc_queue_reqs", "num_decode_transfer_queue_reqs", "num_bootstrap_failed_reqs"),
        *("num_transfer_failed_reqs", "kv_transfer_speed_gb_s", "kv_transfer_latency_ms"),
        *("kv_transfer_bootstrap_ms", "kv_transfer_alloc_ms", "kv_transfer_total_mb"),
        *("pending_prealloc_token_usage", "prefetched_tokens", "backuped_tokens", "prefetch_pgs"),
        *("backup_pgs", "prefetch_bandwidth", "backup_bandwidth", "prefetch_occupied_ratio"),
        *("eviction_duration_seconds", "load_back_duration_seconds", "load_back_tokens"),
    ),
    *(
        _same(name, f"sglang:{name}", "where adapters are served")
        for name in ("lora_pool_slots_used", "lora_pool_slots_total", "lora_pool_utilization")
    ),
    *_absent(
        "nothing here corresponds to it",
        *("swa_token_usage", "mamba_usage", "num_running_reqs_offline_batch", "utilization"),
        *("max_running_requests_under_SLO", "new_token_ratio", "is_cuda_graph", "cuda_graph_passes"),
        *("gpu_execution_seconds", "eplb_balancedness", "eplb_gpu_physical_count"),
        *("num_unique_running_routing_keys", "routing_key_running_req_count", "routing_key_all_req_count"),
        *("dp_cooperation_realtime_tokens", "dp_cooperation_gpu_execution_seconds"),
        *("prefill_delayer_wait_forward_passes", "prefill_delayer_wait_seconds", "prefill_delayer_outcomes"),
    ),
    *_absent("the log says it", "engine_startup_time", "engine_load_weights_time"),
)
ALIASES = tuple(metric for metric in VLLM if metric.how == "same")
"""Metrics that are emitted with --metrics-names vllm, beside ours."""


def table(prefix: str, metrics: tuple[PeerMetric, ...]) -> Iterator[str]:
    yield f"| `{prefix}` | | here | |"
    yield "|---|---|---|---|"
    for metric in metrics:
        ours = f"`{metric.ours}`" if metric.ours else ""
        yield f"| `{metric.name}` | {metric.how} | {ours} | {metric.note} |"


def written(text: str) -> str:
    """Return the page with the lists replaced by the table's."""
    head, marker, _ = text.partition(f"<!-- {MARKER} -->\n")
    lines = ["## vLLM", "", *table("vllm:", VLLM), "", "## SGLang", "", *table("sglang:", SGLANG)]
    return head + marker + "\n".join(["", *lines, ""])


if __name__ == "__main__":
    DOCS.write_text(written(DOCS.read_text()))
