"""The scheduler process: puts its parts together around
an executor and turns the loop until it is told to stop.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from runtime.base.errors import ExecutorError
from runtime.base.registry import resolve
from runtime.checkpoint.checkpoint_config import CheckpointConfig
from runtime.checkpoint.pooling import read_pooling
from runtime.ring.process import HEARTBEAT_S, ProcessContext, run_process
from runtime.ring.roster import NO_SUSPECTS, Roster, Suspects
from runtime.ring.tenants import TenantsFile
from runtime.settings.config import RuntimeConfig
from runtime.wire.format import MAX_SHORT_CHARS
from runtime.wire.messages import ErrorInfo
from runtime.wire.plan import WorkerReady
from runtime.wire.transport import Waiter
from scheduler_proc.batching.composition import (
    BatchingSettings,
    make_batch_builder,
    make_prefix_cache,
    make_schedule_policy,
)
from scheduler_proc.batching.prefill_adder import StepLimits
from scheduler_proc.cache.kv_cache_manager import KVCacheManager
from scheduler_proc.capacity.slots import SlotPool
from scheduler_proc.core.executor import AdapterDevice, AnyExecutor
from scheduler_proc.core.lifecycle import Lifecycle
from scheduler_proc.core.output import Output, make_output
from scheduler_proc.core.rows import Rows
from scheduler_proc.features.beam_search.beam_search import NO_BEAMS, BeamSettings, attach_beam_search
from scheduler_proc.features.embedding import attach_embedding
from scheduler_proc.features.generation_logits import attach_generation_logits
from scheduler_proc.features.grammar_client import GrammarClient
from scheduler_proc.features.guided import attach_guide
from scheduler_proc.features.logits_processors import attach_logits_processors
from scheduler_proc.features.logprobs import attach_logprobs
from scheduler_proc.features.perf_metrics import attach_perf_metrics
from scheduler_proc.features.prompt_outputs import attach_prompt_outputs
from scheduler_proc.features.speculation.speculation import SpeculationSettings, attach_speculation
from scheduler_proc.features.speculation.step_cost import StepCost
from scheduler_proc.features.stamps import attach_stamps
from scheduler_proc.intake.controls import Controls
from scheduler_proc.intake.intake import FeatureFactory, Intake
from scheduler_proc.intake.limits import Limits, QueueShare
from scheduler_proc.loop import SchedulerLoad, SchedulerLoop
from scheduler_proc.observe.snapshot import SnapshotMaker
from scheduler_proc.observe.stats_questions import StatsQuestions
from scheduler_proc.observe.step_log import StepLog
from scheduler_proc.observe.step_profile import StepProfile
from scheduler_proc.observe.step_stats import StatsSettings, StepStats
from scheduler_proc.policy.base import sort_key_of
from scheduler_proc.port import Clock, Port
from scheduler_proc.scheduler import Scheduler
from scheduler_proc.waiting.waiting_room import Patience

# By device: where the worker runs. On a CPU it needs a process of its own; each entry is
# `create(context, on_wait)`, which returns once the worker is ready.
EXECUTORS = {
    "cpu": "model_worker.executors.process:create",
    "cuda": "model_worker.executors.inproc:create",
}


class ServingExecutor(AnyExecutor, AdapterDevice, Protocol):
    """An executor whose worker has said what it can hold."""

    limits: WorkerReady


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
    grammar: GrammarClient | None = None,
    adapters: AdapterDevice | None = None,
) -> Scheduler:
    """Compose the parts around the port. `profile_dir`: as StepProfile's; `roster`: as Lifecycle's;
    `suspects`: as Intake's; `grammar`: None where no guides are kept; `adapters`: None where no adapters are
    served.

    Raises ConfigError when a policy or a cache cannot be found.
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
        SlotPool(0 if adapters is None else config.max_loras, adapters, port.now_s),
        output,
        port.now_s,
        sort_key=sort_key,
        roster=roster,
        patience=Patience(config.max_starvation, config.queue_timeout),
    )
    step_limits = StepLimits(
        config.chunked_prefill_size,
        config.max_batch_size or limits.max_rows,
        cuts_prompts=not config.disable_chunked_prefill,
    )
    controls = Controls(
        lifecycle,
        make_questions(config, lifecycle, step_limits, limits.device, port),
        max_len,
        _settings_in_force(config, executor, limits),
        profile=StepProfile(profile_dir, port),
        snapshots=SnapshotMaker(lifecycle, port.now_s, port.wall_s),
    )
    speculation, step_cost = _speculation(config), StepCost()
    intake = Intake(
        lifecycle,
        _limits_of_requests(
            config, eos_ids, limits, max_len, port.is_client_alone, lifecycle.accounts.has_several
        ),
        embedding_factories(config, output, port.now_s)
        if config.task == "embed"
        else (
            attach_logits_processors(
                config.logits_processor_paths,
                speculates=speculation.has_ngram,
                is_static=config.batching == "static",
            ),
            *feature_factories(
                output,
                kv,
                port.now_s,
                speculation,
                step_cost,
                grammar,
                BeamSettings(config.max_beam_width, limits.vocab_size),
            ),
        ),
        controls=controls,
        clock=port.now_s,
        suspects=suspects,
    )
    builder = make_batch_builder(_batching(config, step_limits), lifecycle, policy, port)
    step_log = StepLog(kv, lifecycle.room, config.decode_log_interval, port.now_s)
    measured = step_cost if speculation.has_ngram else None
    return Scheduler(port, lifecycle, intake, builder, executor, step_log, controls, measured)


def _speculation(config: RuntimeConfig) -> SpeculationSettings:
    return SpeculationSettings(config.speculative_algorithm == "NGRAM", config.speculative_num_draft_tokens)


def _batching(config: RuntimeConfig, limits: StepLimits) -> BatchingSettings:
    return BatchingSettings(
        limits,
        config.batching,
        config.capacity_policy,
        config.schedule_conservativeness,
        config.micro_batch_scheduler,
        config.request_scheduler,
        config.pp_size,
    )


def _limits_of_requests(
    config: RuntimeConfig,
    eos_ids: frozenset[int],
    worker: WorkerReady,
    max_len: int,
    is_client_alone: Callable[[], bool],
    has_tenants: Callable[[], bool],
) -> Limits:
    """`is_client_alone`: whether one client is connected and no other; `has_tenants`: whether there may be
    several.
    """
    max_live = _max_live(config, worker)
    is_set = config.max_queued_requests_per_client > 0
    max_of_client = worker.max_rows + config.max_waiting_of_client
    of_client = QueueShare(
        max_of_client,
        max_live,
        # Alone it may have had the whole queue, unless a limit was set.
        most=max_of_client if is_set else max_live,
        is_lifted=lambda: not is_set and is_client_alone(),
        is_set=is_set,
    )
    unset = msgspec.structs.replace(config, max_queued_requests_per_client=0)
    of_tenant = QueueShare(
        worker.max_rows + unset.max_waiting_of_client,
        max_live,
        most=max_live,
        is_lifted=lambda: not has_tenants() and is_client_alone(),
    )
    return Limits(
        worker.vocab_size,
        max_len,
        eos_ids,
        max_live,
        config.gather_context_logits,
        config.gather_generation_logits,
        config.max_logits_bytes,
        of_client,
        of_tenant,
        max_prompt_len=config.max_prompt_len,
        additional_outputs=config.additional_outputs,
        output_width=worker.output_width,
    )


def _max_live(config: RuntimeConfig, worker: WorkerReady) -> int:
    """Sequences that run or wait at the same time, but for those that are made again."""
    return worker.max_rows + config.max_waiting


def _settings_in_force(
    config: RuntimeConfig, executor: AnyExecutor, limits: WorkerReady
) -> dict[str, int | float | str]:
    """For /server_info."""
    return {
        "model": config.model_names[0],
        "device": limits.device,
        "batching_type": config.batching,
        "capacity_scheduler": config.request_scheduler or config.capacity_policy,
        "schedule_policy": config.schedule_policy,
        "micro_batch_scheduler": config.micro_batch_scheduler,
        "radix_eviction_policy": "none" if config.disable_radix_cache else config.radix_eviction_policy,
        "max_batch_size": config.max_batch_size or limits.max_rows,
        "chunked_prefill_size": config.chunked_prefill_size,
        "disable_chunked_prefill": config.disable_chunked_prefill,
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


def feature_factories(
    output: Output,
    kv: KVCacheManager,
    clock: Clock,
    speculation: SpeculationSettings,
    step_cost: StepCost,
    grammar: GrammarClient | None = None,
    beams: BeamSettings = NO_BEAMS,
) -> tuple[FeatureFactory, ...]:
    """In the order of their hooks: the last ones report what counts."""
    return (
        attach_beam_search(beams, kv, output),
        attach_guide(grammar),
        attach_speculation(speculation, step_cost),
        attach_prompt_outputs(output.add_prompt_logprobs, output.add_tensor),
        attach_generation_logits(output.add_tensor),
        attach_perf_metrics(kv, clock),
        attach_stamps(clock),
        attach_logprobs(output.add_logprobs),
    )


def embedding_factories(config: RuntimeConfig, output: Output, clock: Clock) -> tuple[FeatureFactory, ...]:
    pooling = read_pooling(Path(config.model), config.pooling)
    return (attach_embedding(pooling.kind, output.add_tensor), attach_stamps(clock))


class Heartbeat:
    """Writes this process's slot of the status page: when it is time to, and when its load has changed."""

    def __init__(self, context: ProcessContext) -> None:
        self._context = context
        self._fields: dict[str, Any] = {}
        self._load: SchedulerLoad | None = None
        self._loop: SchedulerLoop | None = None
        self._next_at = 0.0

    def beat(self) -> None:
        """From within a wait: the process lives; but for the steps its figures are those of the last turn."""
        if self._loop is not None:
            self._fields |= self._loop.progress()
        self._context.beat(**self._fields)

    def show_profile(self, is_profiling: bool) -> None:
        """Write it at once: from now on the HTTP server samples all requests, or no longer."""
        self._fields["is_profiling"] = is_profiling
        self._context.beat(force=True, **self._fields)

    def show_pause(self, is_paused: bool) -> None:
        """Write it at once: whoever takes the place of this process reads it from the page."""
        self._fields["is_paused"] = is_paused
        self._context.beat(force=True, **self._fields)

    def beat_after(self, loop: SchedulerLoop) -> None:
        """Show what a turn has changed. Tokenizers admit by the load, so a change of it is shown at once;
        the other figures are gathered at each heartbeat only.
        """
        self._loop = loop
        now = loop.now_s()
        load = loop.load()
        if now >= self._next_at:
            self._next_at = now + HEARTBEAT_S / 2
            self._fields = loop.status()
        elif load != self._load:
            self._fields |= load._asdict() | loop.progress()
        else:
            return
        self._load = load
        self._context.beat(force=True, **self._fields)


def main(context: ProcessContext) -> None:
    config = context.config
    inbox = context.inbox("scheduler_in", context.endpoints.scheduler_in)
    heartbeat = Heartbeat(context)
    try:
        executor: ServingExecutor = resolve("device", config.device, EXECUTORS)(context, heartbeat.beat)
    except ExecutorError:
        if context.stop.is_set():
            return
        raise
    eos_ids = frozenset(CheckpointConfig.read(Path(config.model), config.hf_overrides).eos_token_ids)
    outboxes = [
        context.outbox(context.endpoints.detokenizer_in(i)) for i in range(config.detokenizer_workers)
    ]
    profile_dir = Path(config.profile_dir or context.endpoints.run_dir).absolute()
    has_grammar = config.grammar_backend != "none"
    masks = context.inbox("grammar_out", context.endpoints.grammar_out) if has_grammar else None
    port = Port(
        inbox,
        outboxes,
        context.epoch,
        is_client_alone=lambda: context.status.read("detokenizer").num_clients <= 1,
        new_tenants=TenantsFile(context.endpoints.tenants_file).read_new,
        grammar=masks,
        wait_for_grammar=Waiter([masks.socket] if masks else []).wait,
    )
    grammar = None
    if has_grammar:
        to_grammar = context.outbox(context.endpoints.grammar_in)
        grammar = GrammarClient(to_grammar.send, port.grammar_news, port.now_s)
    scheduler = build_scheduler(
        config,
        eos_ids,
        executor,
        executor.limits,
        port,
        profile_dir=profile_dir,
        roster=Roster.create(context.endpoints.roster_file, 2 * _max_live(config, executor.limits)),
        suspects=Suspects.read(context.endpoints.suspects_file),
        grammar=grammar,
        adapters=executor if config.enable_lora else None,
    )
    lifecycle = scheduler.lifecycle
    if context.was_paused:
        lifecycle.serving.pause()
    lifecycle.serving.on_change = heartbeat.show_pause
    scheduler.profile.on_change = heartbeat.show_profile
    loop = SchedulerLoop(scheduler)
    waiter = Waiter([inbox.socket])
    # Collections in the middle of a step double its 99th percentile; nothing that comes and goes ends in a
    # cycle
    # (tests/cpu/scheduler/test_no_cycles.py).
    gc.collect()
    gc.freeze()
    gc.disable()
    context.ready(num_pages=executor.limits.num_pages, max_len=scheduler.rows.tokens.shape[1])
    try:
        heartbeat.beat_after(loop)
        while not context.stop.is_set():
            timeout_s = loop.turn()
            heartbeat.beat_after(loop)
            if timeout_s:
                waiter.wait(timeout_s)
        if context.is_launch_ending:
            scheduler.fail_all(ErrorInfo("the server is shutting down", "shutting_down", None, 503))
    except ExecutorError as error:
        if config.restart == "never":
            text = f"the model worker failed: {error}"[:MAX_SHORT_CHARS]
            scheduler.fail_all(ErrorInfo(text, "worker_failed", None, 503))
        raise
    finally:
        executor.close()


if __name__ == "__main__":
    run_process("scheduler", main)
