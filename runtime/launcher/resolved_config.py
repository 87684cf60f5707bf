"""resolve_config: fills in the settings that were left open, from the model and the machine.

Settings that contradict each other are refused. Their checks are in `checks/`, in the module named like the
one of `runtime.settings` that declares them.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from runtime.base.cgroup import num_cores
from runtime.base.cpu_isa import cpu_isa, machine_isa
from runtime.base.errors import ConfigError
from runtime.launcher.checks.device import pick_device
from runtime.launcher.checks.engine_settings import check_engine_settings
from runtime.launcher.checks.implementations import check_names, chosen_grammar_backend
from runtime.launcher.checks.model_settings import check_model_settings, check_task, with_adapters
from runtime.launcher.checks.server_settings import check_server_settings, with_environment_key
from runtime.launcher.checks.tokenizer import check_tokenizer_settings
from runtime.settings.config import SETTINGS, RuntimeConfig

logger = logging.getLogger(__name__)

DTYPE_SPELLINGS = {"half": "float16", "float": "float32"}


def check_settings(config: RuntimeConfig) -> None:
    """Refuse settings that are wrong with any model, before one is downloaded. Raises ConfigError."""
    device = _device(config)
    _check(with_environment_key(config), device, has_spec=True)
    if not config.tokenizer or os.path.isdir(config.tokenizer):  # it may be a name, too
        check_tokenizer_settings(config)
    with_adapters(config, device, has_spec=True)


def resolve_config(
    config: RuntimeConfig,
    *,
    context_length: int,
    dtype: str,
    model_path: Path,
    has_spec: bool = True,
    has_head: bool = True,
) -> RuntimeConfig:
    """Return the settings of a launch with this model, whose context length and dtype are given. `has_spec`
    is True if it runs by Carousel's own transformer, `has_head` if it has a language-model head. Raises
    ConfigError.
    """
    if not has_head and config.task == "generate":
        raise ConfigError("task: this checkpoint has no language-model head; serve it with --task embed")
    _check_context_length(config, context_length)
    device = _device(config)
    config = with_environment_key(config)
    _check(config, device, has_spec=has_spec)
    check_tokenizer_settings(config)
    check_task(config, model_path)
    config = with_adapters(config, device, has_spec)
    isa = cpu_isa()
    if device == "cpu":
        held_back = f", of the {machine_isa()} that this CPU has" if isa != machine_isa() else ""
        logger.info("CPU kernels use instruction sets up to %s%s", isa, held_back)
    return msgspec.structs.replace(
        config,
        model=str(model_path),
        served_model_name=config.served_model_name or (model_path.name if config.model else "carousel-demo"),
        tokenizer="" if config.skip_tokenizer_init else config.tokenizer or str(model_path),
        dtype=dtype if config.dtype == "auto" else DTYPE_SPELLINGS.get(config.dtype, config.dtype),
        model_impl="native" if has_spec else "transformers",
        batching_type=config.batching,
        grammar_backend=chosen_grammar_backend(config),
        capacity_scheduler="auto" if config.request_scheduler else config.capacity_policy,
        device=device,
        context_length=config.context_length or context_length,
        root_path=config.root_path.rstrip("/"),
        ssl_certfile=_absolute(config.ssl_certfile),
        ssl_keyfile=_absolute(config.ssl_keyfile),
        cpu_isa=isa,
        cpu_threads=config.cpu_threads or max(1, num_cores() // max(1, config.ranks_per_node)),
    )


def _device(config: RuntimeConfig) -> str:
    return pick_device() if config.device == "auto" else config.device


def _check(config: RuntimeConfig, device: str, *, has_spec: bool) -> None:
    check_names(config)
    chosen_grammar_backend(config)
    check_server_settings(config)
    check_engine_settings(config, has_spec=has_spec)
    check_model_settings(config, device, has_spec=has_spec)


def _check_context_length(config: RuntimeConfig, context_length: int) -> None:
    if config.context_length > context_length:
        raise ConfigError(
            f"context_length: {config.context_length} is more than the model's own {context_length} "
            "positions; --rope-scaling stretches them, --hf-overrides says another number (docs/models.md)"
        )
    longest = SETTINGS["context_length"][1].le
    if longest is not None and (config.context_length or context_length) > longest:
        says = "--hf-overrides or --rope-scaling" if config.hf_overrides else "config.json"
        raise ConfigError(
            f"context_length: the model has {context_length} positions by its {says}; served are {longest} "
            "at most, so give a smaller --context-length"
        )


def _absolute(path: str) -> str:
    return str(Path(path).absolute()) if path else ""
