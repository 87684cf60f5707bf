"""Main program of the scheduler process: builds its parts around an executor, and runs the loop until told to
stop.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Protocol

import msgspec

from runtime.base.errors import ExecutorError
from runtime.base.mask_memory import MaskMemory
from runtime.base.registry import resolve
from runtime.checkpoint.checkpoint_config import CheckpointConfig
from runtime.checkpoint.model_config import ModelConfig
from runtime.ring.process import ProcessContext, run_process
from runtime.ring.suspects.roster import Roster, Seen, Suspects
from runtime.ring.tenants import TenantsFile
from runtime.settings.config import RuntimeConfig
from runtime.text.codec import Decoders
from runtime.text.selection import open_decoders, open_tokenizer
from runtime.wire.format import MAX_SHORT_CHARS
from runtime.wire.messages import ErrorInfo
from runtime.wire.plan import WorkerReady
from runtime.wire.transport import Waiter
from scheduler_proc.build_scheduler import build_scheduler
from scheduler_proc.core.executor import AdapterDevice, AnyExecutor
from scheduler_proc.feature_factories import speculation_of
from scheduler_proc.features.grammar_client import GrammarClient
from scheduler_proc.features.mask_slots import MaskSlots
from scheduler_proc.heartbeat import Heartbeat
from scheduler_proc.intake.limits import max_live
from scheduler_proc.intake.worker_calls import CalledRanks
from scheduler_proc.loop import SchedulerLoop
from scheduler_proc.port import Port

# Where the worker runs, by device. On a CPU it needs a process of its own. Each entry is `create(context,
# on_wait)`, which returns once the worker is ready.
EXECUTORS = {
    "cpu": "model_worker.executors.process:create",
    "cuda": "model_worker.executors.inproc:create",
}


class ServingExecutor(AnyExecutor, AdapterDevice, CalledRanks, Protocol):
    """Executor whose worker has reported its limits."""

    limits: WorkerReady


def _can_call_ranks(config: RuntimeConfig) -> bool:
    """Return True if all ranks can answer calls. On CUDA the first rank is in this process, and the others
    send nothing to it.
    """
    return config.device == "cpu" or config.tp_size == 1


def _decoders_of_searches(context: ProcessContext) -> Decoders | None:
    """Return the decoders that make the text of hypotheses, which a stop string may end; None without beam
    searches or without a tokenizer.
    """
    config = context.config
    if config.max_beam_width == 1 or not config.tokenizer:
        return None
    return open_decoders(open_tokenizer(config.tokenizer, prepared=context.endpoints.tokenizer_file))


def _attention_span(config: RuntimeConfig) -> int:
    """Return the attention span of the model, which must have a spec. Settings with other models
    are refused.
    """
    model = ModelConfig.from_path(
        Path(config.model), config.context_length, config.model_spec, config.hf_overrides
    )
    return msgspec.structs.replace(model, max_attention_window=config.max_attention_window).attention_span()


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
        adapters_dir=context.endpoints.inline_adapters if config.enable_lora else None,
    )
    grammar = None
    if has_grammar:
        to_grammar = context.outbox(context.endpoints.grammar_in)
        slots = None
        if config.answers_here:  # no other machine can open the memory: masks go there in messages
            num_sequences = max_live(config, executor.limits)
            width = 1 + speculation_of(config).num_draft_tokens
            memory = MaskMemory.create(num_sequences * width, 4 * -(-executor.limits.vocab_size // 32))
            slots = MaskSlots(memory, num_sequences, width)
        grammar = GrammarClient(to_grammar.send, port.grammar_news, port.now_s, slots)
    interrupted = Seen.read(context.endpoints.roster_file).present
    scheduler = build_scheduler(
        config,
        eos_ids,
        executor,
        executor.limits,
        port,
        profile_dir=profile_dir,
        roster=Roster.create(
            context.endpoints.roster_file, 2 * max_live(config, executor.limits), executor.limits.max_rows
        ),
        suspects=Suspects.read(context.endpoints.suspects_file),
        interrupted=interrupted,
        grammar=grammar,
        adapters=executor if config.enable_lora else None,
        ranks=executor if _can_call_ranks(config) else None,
        decoders=_decoders_of_searches(context),
        attention_span=_attention_span(config) if config.enable_dynamic_chunking else 0,
        to_launcher=context.outbox(context.endpoints.launcher_in) if config.weights_dir else None,
    )
    lifecycle = scheduler.lifecycle
    if context.was_paused:
        lifecycle.serving.pause()
    lifecycle.serving.on_change = heartbeat.show_pause
    scheduler.profile.on_change = heartbeat.show_profile
    loop = SchedulerLoop(scheduler)
    waiter = Waiter([inbox.socket, context.stop_wake.fd])
    mask_waiter = Waiter([inbox.socket, context.stop_wake.fd, *([masks.socket] if masks else [])])
    # A collection in the middle of a step doubles the 99th percentile of step times, and no object of a
    # request ends in a cycle (tests/cpu/scheduler/test_no_cycles.py).
    gc.collect()
    gc.freeze()
    gc.disable()
    context.ready(num_pages=executor.limits.num_pages, max_len=scheduler.rows.tokens.shape[1])
    try:
        heartbeat.beat_after(loop)
        while not (context.stop.is_set() or scheduler.has_given_way):
            timeout_s = loop.turn()
            heartbeat.beat_after(loop)
            if timeout_s:
                loop.rest(timeout_s, waiter.wait, mask_waiter.wait, context.stop.wait)
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
