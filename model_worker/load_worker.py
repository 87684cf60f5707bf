"""Loading of a worker: its part of the model, the KV cache in the memory that is left, and the
warm-up steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from model_worker.adapters.slots import AdapterSlots
from model_worker.device.base import Device
from model_worker.device.cpu import memory_bytes
from model_worker.device.cuda import FP8_NEEDS, has_fp8
from model_worker.device.out_of_memory import when_out_of_memory
from model_worker.distributed.group import RankGroup
from model_worker.distributed.layout import Layout
from model_worker.membership import ALONE, Membership
from model_worker.memory.kv_pool import MHATokenToKVPool
from model_worker.memory.prompt_tables import PromptTables
from model_worker.models.transformer import CausalLM
from model_worker.runner.build_runner import build_runner
from model_worker.runner.device_memory import TRIAL_TOKENS, free_beside_steps, make_kv_pool, size_kv_pool
from model_worker.runner.model_runner import ModelRunner
from model_worker.sampling.processors.runner import ProcessorRunner, load_processors
from model_worker.served_model import layers_of_stages, load_served_model
from model_worker.worker import ModelWorker
from runtime.base.errors import ConfigError, InvalidRequest
from runtime.base.progress import Progress
from runtime.checkpoint.checkpoint_config import CheckpointConfig
from runtime.checkpoint.model_config import ModelConfig
from runtime.checkpoint.pooling import read_pooling
from runtime.checkpoint.weight_files import weight_files
from runtime.settings.config import RuntimeConfig
from runtime.settings.graph_sizes import graph_sizes

logger = logging.getLogger(__name__)


class LoadProgress:
    """Reports the loading progress, and that the process is alive."""

    def __init__(
        self, on_progress: Callable[[], None], on_loaded: Callable[[float], None] = lambda share: None
    ) -> None:
        self._on_progress = on_progress
        self._on_loaded = on_loaded
        self._progress = Progress("loading weights", "tensors", say=logger.info)

    def note(self, loaded: int, total: int) -> None:
        self._on_loaded(loaded / total)
        self._on_progress()
        self._progress.note(loaded, total)


def load_worker(
    config: RuntimeConfig,
    device: Device,
    on_progress: Callable[[], None],
    member: Membership = ALONE,
    on_loaded: Callable[[float], None] = lambda share: None,
) -> ModelWorker:
    """Load this rank's part of the model (settings must be resolved), allocate the KV cache in the remaining
    memory, and warm up; returns when all ranks have.

    on_progress is called after each tensor that was read; on_loaded is called before it, with the share of
    weights that is loaded. Raises ModelError, ConfigError or GroupError.
    """
    # On the stream that will use the memory: memory of another stream would have to be waited for.
    progress = LoadProgress(on_progress, on_loaded)
    load = device.forward_stream.launch(lambda: _load_runner(config, device, progress, member))
    worker = ModelWorker(*load.wait())
    on_progress()
    with when_out_of_memory("computing the first steps", "lower --mem-fraction-static"):
        worker.warm_up(on_progress)
    worker.log_kernels()
    return worker


def _load_runner(
    config: RuntimeConfig, device: Device, progress: LoadProgress, member: Membership
) -> tuple[ModelRunner, Device, AdapterSlots | None]:
    layout, group, world, link = member
    kv_dtype = _kv_dtype(config)
    processors = _processors(config, device, group)
    if layout.answers:
        _log_weights(config)
    with when_out_of_memory(
        "loading the weights",
        "take a narrower --dtype or a larger --tp-size, or end what else uses the device",
    ):
        model, ops, checkpoint, rows = load_served_model(config, device, progress.note, group, layout.stage)
    tables = None if rows is None else _prompt_tables(config, checkpoint, device)
    kv_layout = model.kv_layout
    world.smallest(0)  # all ranks have loaded their weights, so the memory that is free now is free for KV
    sizes = graph_sizes(config) if device.replays_launches and config.task == "generate" else ()

    def make_pool(num_pages: int) -> MHATokenToKVPool:
        return make_kv_pool(num_pages, config.page_size, kv_layout, kv_dtype, device)

    def make_runner(kv_pool: MHATokenToKVPool, sizes: Sequence[int]) -> ModelRunner:
        options: dict[str, Any] = {
            "max_rows": config.max_running_requests,
            "max_len": config.context_length,
            "vocab_size": checkpoint.vocab_size,
            "attention_window": kv_layout.attention_window,
            "group": group,
            "max_tokens": config.chunked_prefill_size,
            "records_steps": not config.disable_cuda_graph,
            "row_adapters": rows,
            "prompt_tables": tables,
            "output_width": _output_width(config, checkpoint),
            "processors": processors,
        }
        if config.task == "embed":
            pooling = read_pooling(Path(config.model), config.pooling)
            return build_runner(model, kv_pool, ops, device, **options, pooling=pooling)
        if link is not None:
            return build_runner(model, kv_pool, ops, device, **options, link=link)
        options["graph_sizes"] = sizes
        if config.speculative_algorithm != "none":
            options["max_guesses"] = config.speculative_num_draft_tokens
        return build_runner(model, kv_pool, ops, device, **options)

    def make_trial(some: Sequence[int]) -> ModelRunner:
        return make_runner(make_pool(-(-TRIAL_TOKENS // config.page_size)), some)

    free_bytes = free_beside_steps(make_trial, sizes, device, config.chunked_prefill_size)
    bytes_per_token = kv_layout.bytes_per_token(kv_dtype)
    num_sharing = 1 if device.has_own_memory else config.ranks_per_node
    if layout.num_stages > 1 and not device.has_own_memory:
        assert isinstance(checkpoint, ModelConfig), "settings with stages are refused for any other"
        # Stages of different sizes share one memory: a token takes the bytes of all ranks on this machine.
        bytes_per_token = bytes_per_token // kv_layout.num_layers * _num_layers_here(config, checkpoint)
        num_sharing = 1
    num_pages = size_kv_pool(
        free_bytes=free_bytes,
        fraction=config.mem_fraction_static,
        bytes_per_token=bytes_per_token,
        page_size=config.page_size,
        max_total_tokens=config.max_total_tokens,
        host_bytes=None if device.has_own_memory else memory_bytes(),
        num_sharing=num_sharing,
    )
    # A plan names pages by numbers that every rank must have.
    num_pages = world.smallest(num_pages)
    kv_pool = make_pool(num_pages)
    kv_bytes = (num_pages + 1) * kv_pool.bytes_per_page()
    _log_size(config, num_pages, kv_bytes, kv_dtype, device)
    slots = None
    if rows is not None:
        slots = _slots(config, model, device, group, tables)
        left = max(0, free_bytes - group.size * kv_bytes)
        slots.max_rows = int(config.lora_device_percent * left) // slots.row_bytes
    return make_runner(kv_pool, sizes), device, slots


def _num_layers_here(config: RuntimeConfig, checkpoint: ModelConfig) -> int:
    """Return the sum of the layers of all ranks on this machine."""
    layers = layers_of_stages(config, checkpoint)
    here = (rank for rank in range(config.num_ranks) if config.node_of_rank(rank) == config.node_rank)
    return sum(len(layers[Layout.of_rank(rank, config.pp_size, config.tp_size).stage]) for rank in here)


def _processors(config: RuntimeConfig, device: Device, group: RankGroup) -> ProcessorRunner | None:
    """Return the logits processors that this rank calls, or None. Raises ConfigError."""
    paths, is_replicated = config.logits_processor_paths, not config.disable_logits_processor_replicate
    if not paths or (group.rank > 0 and not is_replicated):
        return None
    return ProcessorRunner(load_processors(paths), device, group, is_replicated=is_replicated)


def _prompt_tables(config: RuntimeConfig, checkpoint: CheckpointConfig, device: Device) -> PromptTables:
    assert isinstance(checkpoint, ModelConfig), "settings with adapters are refused for any other"
    dtype: torch.dtype = getattr(torch, config.dtype)
    return PromptTables(
        device, config.max_running_requests, checkpoint.vocab_size, checkpoint.hidden_size, dtype
    )


def _output_width(config: RuntimeConfig, checkpoint: CheckpointConfig) -> int:
    """Return the number of values in a row of an additional output; 0 if there are none."""
    if not config.additional_outputs:
        return 0
    assert isinstance(checkpoint, ModelConfig), "settings with additional outputs are refused for any other"
    return checkpoint.hidden_size


def _slots(
    config: RuntimeConfig, model: object, device: Device, group: RankGroup, tables: PromptTables | None
) -> AdapterSlots:
    """Return the slots for adapters, after checking that the adapters of the settings fit the model. Raises
    ConfigError.
    """
    assert isinstance(model, CausalLM), "settings with adapters are refused for any other"
    slots = AdapterSlots(
        model,
        device,
        max_rank=config.max_lora_rank,
        tables=tables,
        rank=group.rank,
        num_threads=config.lora_load_workers,
    )
    for path in config.adapter_paths.values():
        try:
            slots.check(Path(path))
        except InvalidRequest as error:
            raise ConfigError(f"lora_modules: {error.message}") from None
    return slots


def _log_weights(config: RuntimeConfig) -> None:
    """Log which files will be read, and their size. Raises ModelError if they are missing."""
    if config.load_format == "dummy":
        logger.info("making random weights, because of --load-format dummy")
        return
    files = weight_files(Path(config.model))
    num_bytes = sum(path.stat().st_size for path in files)
    num_files = f"{len(files)} file{'s' if len(files) > 1 else ''}"
    logger.info("loading weights: %s in %s from %s", _in_words(num_bytes), num_files, config.model)


def _in_words(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / (1 << 20):.1f} MiB"


def _log_size(
    config: RuntimeConfig, num_pages: int, num_bytes: int, dtype: torch.dtype, device: Device
) -> None:
    """Log the size of the KV cache, how to change it, and the requests that it is too small for."""
    num_tokens = num_pages * config.page_size
    if device.has_own_memory:
        share, knob = "", "--mem-fraction-static or --max-total-tokens"
    else:
        share, knob = f" of this machine's {_in_words(memory_bytes())}", "--max-total-tokens"
    logger.info(
        "KV cache: %d tokens in %d pages of %d, %s%s, %s on %s; %s changes it",
        num_tokens,
        num_pages,
        config.page_size,
        _in_words(num_bytes),
        share,
        str(dtype).removeprefix("torch."),
        device.name,
        knob,
    )
    if num_tokens < config.context_length:
        logger.warning(
            "the longest sequence is %d tokens, not %d, because no more fit into the KV cache: raise %s, or "
            "lower --context-length",
            num_tokens,
            config.context_length,
            knob,
        )


def _kv_dtype(config: RuntimeConfig) -> torch.dtype:
    if config.kv_cache_dtype == "auto":
        dtype: torch.dtype = getattr(torch, config.dtype)
        return dtype
    if not has_fp8():
        raise ConfigError(f"kv_cache_dtype: fp8_e4m3 needs {FP8_NEEDS}")
    return torch.float8_e4m3fn
