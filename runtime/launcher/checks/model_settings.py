"""Checks of the settings of `runtime.settings.model_settings`: what the model worker computes, and how."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from runtime.base.errors import ConfigError, InvalidRequest
from runtime.checkpoint.adapters.lora_config import read_adapter
from runtime.checkpoint.pooling import read_pooling
from runtime.launcher.checks.device import num_gpus
from runtime.settings.config import RuntimeConfig
from runtime.settings.graph_sizes import graph_sizes
from runtime.settings.model_settings import AdapterSettings

logger = logging.getLogger(__name__)

BACKEND_DEVICES = {"cpu_native": "cpu", "flashinfer": "cuda", "triton": "cuda"}
"""Attention backends that only run on one kind of device."""


def check_model_settings(config: RuntimeConfig, device: str, *, has_spec: bool) -> None:
    """Raise ConfigError for settings that contradict each other or the device. `has_spec` is True for a model
    that runs by Carousel's own transformer.
    """
    _check_ranks(config, device, has_spec)
    _check_stages(config, device, has_spec)
    _check_attention_backend(config.attention_backend, device)
    _check_kv_dtype(config, device)
    _check_quantization(config, device, has_spec)
    if config.deterministic:
        _check_deterministic(device, has_spec)
    _check_graphs(config, device)
    _check_logits_processors(config)
    _check_raw_logits(config)


def check_task(config: RuntimeConfig, model_path: Path) -> None:
    """Check an embedding model's pooling before anything is loaded. Raises ModelError for a kind that is not
    supported.
    """
    if config.task == "embed":
        read_pooling(model_path, config.pooling)
        for name in ("gather_context_logits", "gather_generation_logits"):
            if getattr(config, name):
                raise ConfigError(f"{name}: an embedding model has no logits")
        if config.speculative_algorithm != "none":
            raise ConfigError("speculative_algorithm: an embedding model generates nothing to guess")
    elif config.pooling != "auto":
        raise ConfigError(f"pooling: {config.pooling} is for an embedding model; add --task embed")


def with_adapters(config: RuntimeConfig, device: str, has_spec: bool) -> RuntimeConfig:
    """Return the settings with absolute paths of the adapters, after checking what can be checked without the
    model. Raises ConfigError.
    """
    paths = config.adapter_paths
    if not (config.enable_lora or paths):
        default = RuntimeConfig()
        for name in AdapterSettings.__annotations__.keys() - {"TITLE", "enable_lora", "lora_modules"}:
            if getattr(config, name) != getattr(default, name):
                raise ConfigError(f"{name}: no adapters are served; add --enable-lora, or leave it out")
        return config
    if device != "cpu" and config.tp_size > 1:
        raise ConfigError("enable_lora: several GPUs compute no adapters; use --tp-size 1, or merge one")
    if not has_spec:
        raise ConfigError(
            "enable_lora: adapters need a model that has a spec (docs/models.md), which the transformers "
            "library's own modules are not"
        )
    if config.task == "embed":
        raise ConfigError("enable_lora: an embedding model has no adapters")
    if device != "cpu":
        for name in ("lora_device_rows", "lora_device_percent"):
            if getattr(config, name):
                raise ConfigError(
                    f"{name}: a GPU's tables are for --max-loras adapters of --max-lora-rank; lower these"
                )
    modules = {name: Path(path).absolute() for name, path in paths.items()}
    for path in modules.values():
        try:
            read_adapter(path, config.max_lora_rank)
        except InvalidRequest as error:
            raise ConfigError(f"lora_modules: {error.message}") from None
    if config.allow_lora_updates and not config.lora_dir:
        raise ConfigError("allow_lora_updates: say with --lora-dir below which directory adapters are")
    if config.lora_dir and not os.path.isdir(config.lora_dir):
        raise ConfigError(f"lora_dir: there is no directory {config.lora_dir}")
    return msgspec.structs.replace(
        config,
        enable_lora=True,
        lora_modules=",".join(f"{name}={path}" for name, path in modules.items()),
        lora_dir=os.path.abspath(config.lora_dir) if config.lora_dir else "",
    )


def _check_ranks(config: RuntimeConfig, device: str, has_spec: bool) -> None:
    if not has_spec and config.tp_size != 1:
        raise ConfigError(
            "tp_size: --model-impl transformers computes on one rank only; leave --tp-size at 1, or use a "
            "model that has a spec (docs/models.md)"
        )
    if device == "cuda" and config.tp_size > max(1, found := num_gpus()):
        raise ConfigError(f"tp_size: {config.tp_size} ranks need as many GPUs; there are {found}")


def _check_stages(config: RuntimeConfig, device: str, has_spec: bool) -> None:
    """Raise ConfigError for settings that pipeline stages do not support."""
    if config.pp_size == 1:
        if config.pp_layers:
            raise ConfigError("pp_layers: there is one stage; add --pp-size, or leave it out")
        return
    reasons = {
        "device": (device != "cpu", "stages compute on a CPU; use --device cpu, or --tp-size on GPUs"),
        "model_impl": (not has_spec, "has no stages; use a model that has a spec (docs/models.md)"),
        "task": (config.task == "embed", "embeddings have no stages; leave --pp-size at 1"),
        "speculative_algorithm": (
            config.speculative_algorithm != "none",
            "guesses are not verified in stages; leave it out, or --pp-size at 1",
        ),
        "enable_lora": (
            config.enable_lora or bool(config.adapter_paths),
            "adapters are not cut into stages; leave it out, or --pp-size at 1",
        ),
        "additional_output": (
            bool(config.additional_outputs),
            "stages hand over no tensors of layers; leave it out, or --pp-size at 1",
        ),
        "logits_processors": (
            bool(config.logits_processor_paths),
            "are not called in stages; leave them out, or --pp-size at 1",
        ),
        "max_beam_width": (
            config.max_beam_width > 1,
            "beams step together, which micro-batches do not; leave it at 1, or --pp-size at 1",
        ),
    }
    for name, (is_so, reason) in reasons.items():
        if is_so:
            raise ConfigError(f"pp_size: {config.pp_size} stages, but {name}: {reason}")


def _check_attention_backend(name: str, device: str) -> None:
    if device == BACKEND_DEVICES.get(name, device):
        return
    raise ConfigError(
        f"attention_backend: {name} cannot be used: the device is {device}; leave --attention-backend out"
    )


def _check_kv_dtype(config: RuntimeConfig, device: str) -> None:
    if config.kv_cache_dtype == "auto":
        return
    if device != "cuda":
        raise ConfigError(f"kv_cache_dtype: {config.kv_cache_dtype} is for CUDA; the device is {device}")
    if config.attention_backend not in ("auto", "triton"):
        raise ConfigError(
            f"kv_cache_dtype: {config.kv_cache_dtype} is read by --attention-backend triton, not by "
            f"{config.attention_backend}"
        )


def _check_quantization(config: RuntimeConfig, device: str, has_spec: bool) -> None:
    if config.quantization == "auto":
        return
    if device != "cpu":
        raise ConfigError(
            f"quantization: {config.quantization} is for a CPU; use --device cpu, or a float8 checkpoint"
        )
    if not has_spec:
        raise ConfigError(
            f"quantization: {config.quantization} needs a model that has a spec (docs/models.md), which the "
            "transformers library's own modules are not"
        )


def _check_deterministic(device: str, has_spec: bool) -> None:
    """Raise ConfigError for settings without a fixed order of summation. The worker itself checks the CPU."""
    if device != "cpu":
        raise ConfigError("deterministic: CUDA's matrix products depend on the batch; use --device cpu")
    if not has_spec:
        raise ConfigError(
            "deterministic: the transformers library's own modules promise no order of summation; use one "
            "that has a spec (docs/models.md)"
        )


def _check_graphs(config: RuntimeConfig, device: str) -> None:
    graph_sizes(config)
    for name in ("cuda_graph_bs", "cuda_graph_max_bs"):
        if device == "cpu" and getattr(config, name):
            raise ConfigError(f"{name}: the device is a CPU, which has no CUDA graphs; leave it out")
        if config.task == "embed" and getattr(config, name):
            raise ConfigError(f"{name}: steps of an embedding model are not recorded; leave it out")
    if config.disable_cuda_graph and config.task == "embed":
        logger.info("disable_cuda_graph: nothing changes: steps of an embedding model are not recorded")
    elif config.disable_cuda_graph and device == "cpu" and config.tp_size > 1:
        logger.info("disable_cuda_graph: nothing changes: steps of several ranks on a CPU are not recorded")


def _check_logits_processors(config: RuntimeConfig) -> None:
    """Raise ConfigError if a logits processor cannot be found. Only the worker imports them, because they
    need torch.
    """
    if not config.logits_processor_paths:
        if config.disable_logits_processor_replicate:
            raise ConfigError(
                "disable_logits_processor_replicate: there are none; add --logits-processor, or leave it out"
            )
    elif config.batching == "static":
        raise ConfigError(
            "logits_processor: not supported with static batching (--batching-type); leave one of them out"
        )
    elif config.task == "embed":
        raise ConfigError("logits_processor: an embedding model has no logits")


def _check_raw_logits(config: RuntimeConfig) -> None:
    gathers = config.gather_context_logits or config.gather_generation_logits or config.additional_outputs
    if config.max_logits_bytes != RuntimeConfig().max_logits_bytes and not gathers:
        raise ConfigError(
            "max_logits_bytes: no request may ask for raw logits; allow it with --gather-context-logits, "
            "--gather-generation-logits or --additional-output, or leave it out"
        )
