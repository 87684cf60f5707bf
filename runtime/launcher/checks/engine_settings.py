"""Checks of the settings of `runtime.settings.engine_settings`: KV cache, scheduler, speculation."""

from __future__ import annotations

from runtime.base.errors import ConfigError
from runtime.settings.config import RuntimeConfig

BY_PREFIX = ("lpm", "longest_prefix", "dfs-weight")
"""Schedule policies that use the cached length of prompts."""


def check_engine_settings(config: RuntimeConfig, *, has_spec: bool) -> None:
    """Raise ConfigError for settings that contradict each other. `has_spec` is True for a model that runs by
    Carousel's own transformer.
    """
    _check_kv_cache(config)
    _check_scheduling(config, has_spec)
    _check_speculation(config)


def _check_kv_cache(config: RuntimeConfig) -> None:
    if config.max_total_tokens and config.max_total_tokens < max(2, config.page_size):
        raise ConfigError(
            f"max_total_tokens: {config.max_total_tokens} is less than a page of {config.page_size} tokens; "
            "raise it, or lower --page-size"
        )
    if config.disable_radix_cache and config.radix_eviction_policy != "lru":
        raise ConfigError("radix_eviction_policy: with disable_radix_cache there is nothing to evict")
    if config.disable_radix_cache and config.schedule_policy in BY_PREFIX:
        raise ConfigError(
            f"schedule_policy: {config.schedule_policy} orders by cached prefixes, and with "
            "disable_radix_cache there are none; take fcfs"
        )


def _check_scheduling(config: RuntimeConfig, has_spec: bool) -> None:
    if config.enable_dynamic_chunking and (config.disable_chunked_prefill or not has_spec):
        reason = (
            "prompts are computed whole with --disable-chunked-prefill"
            if config.disable_chunked_prefill
            else "what a token costs is known of models that have a spec (docs/models.md)"
        )
        raise ConfigError(f"enable_dynamic_chunking: {reason}; leave one of them out")
    if config.max_beam_width > config.max_running_requests:
        raise ConfigError(
            f"max_beam_width: {config.max_beam_width} beams take as many rows, of which max_running_requests "
            f"gives {config.max_running_requests}; raise that, or ask for fewer beams"
        )
    if config.max_beam_width > 1 and config.beam_batching == "drain" and config.schedule_policy != "fcfs":
        raise ConfigError(
            "schedule_policy: with --beam-batching drain requests start in the order of their arrival, not "
            f"by {config.schedule_policy}; leave one of them out"
        )
    if config.max_beam_width > 1 and config.task == "embed":
        raise ConfigError("max_beam_width: an embedding model searches nothing; leave it out")
    capacity = config.capacity_policy
    if config.batching == "static" and capacity != "static_batch":
        raise ConfigError(f"capacity_scheduler: with static batching it is static_batch, not {capacity}")
    if config.batching != "inflight_fused" and (config.micro_batch_scheduler or config.request_scheduler):
        raise ConfigError("batching_type: your own scheduler decides what a step is made of")
    if config.request_scheduler and (config.capacity_scheduler != "auto" or config.micro_batch_scheduler):
        raise ConfigError(
            "request_scheduler: it stands for capacity and micro-batch scheduler; give one or both"
        )
    if config.schedule_policy == "priority" and (capacity != "max_utilization" or config.request_scheduler):
        raise ConfigError("schedule_policy: priority takes rows back, which only max_utilization does")
    if config.schedule_conservativeness != 1.0 and capacity != "max_utilization":
        raise ConfigError(f"schedule_conservativeness: {capacity} estimates nothing that it could change")


def _check_speculation(config: RuntimeConfig) -> None:
    default = RuntimeConfig()
    guesses = "speculative_num_draft_tokens"
    if config.speculative_algorithm == "none" and getattr(config, guesses) != getattr(default, guesses):
        raise ConfigError(
            f"{guesses}: nothing is guessed; add --speculative-algorithm NGRAM, or leave it out"
        )
