"""Construction of a scheduler from its parts, around a port and an executor."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from runtime.ring.suspects.roster import NO_SUSPECTS, Roster, Suspects
from runtime.settings.config import RuntimeConfig
from runtime.text.codec import Decoders
from runtime.wire.plan import WorkerReady
from runtime.wire.transport import Outbox
from scheduler_proc.adapter_capacity import make_inline_store, make_slots
from scheduler_proc.batching.chunk_costs import ChunkCosts
from scheduler_proc.batching.composition import (
    BatchingSettings,
    make_batch_builder,
    make_prefix_cache,
    make_schedule_policy,
)
from scheduler_proc.batching.prefill_adder import StepLimits
from scheduler_proc.cache.kv_cache_manager import KVCacheManager
from scheduler_proc.core.executor import AdapterDevice, AnyExecutor
from scheduler_proc.core.lifecycle import Lifecycle
from scheduler_proc.core.output import make_output
from scheduler_proc.core.rows import Rows
from scheduler_proc.feature_factories import make_features
from scheduler_proc.features.grammar_client import GrammarClient
from scheduler_proc.intake.controls import Controls
from scheduler_proc.intake.intake import Intake
from scheduler_proc.intake.limits import make_limits
from scheduler_proc.intake.worker_calls import CalledRanks, WorkerCalls
from scheduler_proc.observe.snapshot import SnapshotMaker
from scheduler_proc.observe.stats_questions import StatsQuestions
from scheduler_proc.observe.step_log import StepLog
from scheduler_proc.observe.step_profile import StepProfile
from scheduler_proc.observe.step_stats import StatsSettings, StepStats
from scheduler_proc.policy.base import sort_key_of
from scheduler_proc.port import Port
from scheduler_proc.scheduler import Scheduler
from scheduler_proc.waiting.waiting_room import Patience


def build_scheduler(
    config: RuntimeConfig,
    eos_ids: frozenset[int],
    executor: AnyExecutor,
    limits: WorkerReady,
    port: Port,
    *,
    profile_dir: Path | None = None,
    roster: Roster | None = None,
    suspects: Suspects = NO_SUSPECTS,
    interrupted: Iterable[bytes] = (),
    grammar: GrammarClient | None = None,
    adapters: AdapterDevice | None = None,
    ranks: CalledRanks | None = None,
    decoders: Decoders | None = None,
    attention_span: int = 0,
    to_launcher: Outbox | None = None,
) -> Scheduler:
    """Build a Scheduler. Raises ConfigError when a policy or a cache cannot be found.

    - profile_dir, roster, suspects, interrupted: as in StepProfile, Lifecycle and Intake.
    - grammar: None where no guides are served. adapters: None where no adapters are served.
    - ranks: None where ranks cannot be called. decoders: None where beam searches have no text.
    - attention_span: as in ChunkCosts; 0 where all chunks of a prompt cost the same.
    - to_launcher: None where weights cannot be updated.
    """
    page_size = limits.page_size
    max_len = min(config.context_length, limits.max_len, limits.num_pages * page_size)
    rows = Rows(limits.max_rows, max_len)
    cache = make_prefix_cache(
        page_size, port, config.radix_eviction_policy, is_disabled=config.disable_radix_cache
    )
    kv = KVCacheManager(limits.num_pages, page_size, rows, cache, limits.attention_window)
    output = make_output(port.outboxes, port.epoch)
    policy = make_schedule_policy(config.schedule_policy, port)
    sort_key = sort_key_of(policy, kv)
    lifecycle = Lifecycle(
        kv,
        make_slots(config, limits, adapters, port),
        output,
        port.now_s,
        sort_key=sort_key,
        roster=roster,
        patience=Patience(config.max_starvation, config.queue_timeout),
        weight_version=config.weight_version,
    )
    step_limits = StepLimits(
        config.chunked_prefill_size,
        config.max_batch_size or limits.max_rows,
        cuts_prompts=not config.disable_chunked_prefill,
        costs=ChunkCosts(config.chunked_prefill_size, attention_span) if attention_span else None,
    )
    inline = make_inline_store(config, limits, lifecycle, port)
    controls = Controls(
        lifecycle,
        make_questions(config, lifecycle, step_limits, limits.device, port),
        max_len,
        _settings_in_force(config, executor, limits),
        profile=StepProfile(profile_dir, port),
        snapshots=SnapshotMaker(lifecycle, port.now_s, port.wall_s),
        calls=WorkerCalls(ranks, output, port, config.ranks_per_node if config.nnodes > 1 else 0),
        inline=inline,
        to_launcher=to_launcher,
        epoch=port.epoch,
    )
    features = make_features(config, output, kv, port.now_s, grammar, limits.vocab_size, decoders)
    intake = Intake(
        lifecycle,
        make_limits(config, eos_ids, limits, max_len, port.is_client_alone, lifecycle.accounts.has_several),
        features.factories,
        controls=controls,
        clock=port.now_s,
        suspects=suspects,
        interrupted=interrupted,
        inline=inline,
        may_ask=features.may_ask,
    )
    builder = make_batch_builder(_batching(config, step_limits), lifecycle, policy, port)
    step_log = StepLog(kv, lifecycle.room, config.decode_log_interval, port.now_s)
    made = Scheduler(port, lifecycle, intake, builder, executor, step_log, controls, features.step_cost)
    made.masks.source = grammar
    return made


def _batching(config: RuntimeConfig, limits: StepLimits) -> BatchingSettings:
    return BatchingSettings(
        limits,
        config.batching,
        config.capacity_policy,
        config.schedule_conservativeness,
        config.micro_batch_scheduler,
        config.request_scheduler,
        config.pp_size,
        config.beam_batching == "drain" and config.max_beam_width > 1,
    )


def _settings_in_force(
    config: RuntimeConfig, executor: AnyExecutor, limits: WorkerReady
) -> dict[str, int | float | str]:
    """Return the settings as the scheduler applies them, for /server_info."""
    return {
        "model": config.model_names[0],
        "model_path": config.model,
        "weight_version": config.weight_version,
        "device": limits.device,
        "batching_type": config.batching,
        "capacity_scheduler": config.request_scheduler or config.capacity_policy,
        "schedule_policy": config.schedule_policy,
        "micro_batch_scheduler": config.micro_batch_scheduler,
        "radix_eviction_policy": "none" if config.disable_radix_cache else config.radix_eviction_policy,
        "max_batch_size": config.max_batch_size or limits.max_rows,
        "chunked_prefill_size": config.chunked_prefill_size,
        "disable_chunked_prefill": config.disable_chunked_prefill,
        "enable_dynamic_chunking": config.enable_dynamic_chunking,
        "grammar_backend": config.grammar_backend,
        "max_steps_in_flight": executor.max_in_flight,
        "speculative_algorithm": config.speculative_algorithm,
        "additional_output": config.additional_output,
    }


def make_questions(
    config: RuntimeConfig, lifecycle: Lifecycle, limits: StepLimits, device: str, port: Port
) -> StatsQuestions:
    kept = StatsSettings(
        limits,
        config.batching == "static",
        config.iter_stats_max_iterations,
        config.request_stats_max_iterations,
        hides_memory=device.startswith("cuda"),
        num_stages=config.pp_size,
    )
    return StatsQuestions(StepStats(lifecycle, kept, port.now_s, port.wall_s), lifecycle.output)
