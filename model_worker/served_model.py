"""Makes a worker's model, by a spec or by the transformers library, and chooses its Ops."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from model_worker.device.base import Device
from model_worker.distributed.group import SOLO, RankGroup
from model_worker.loading.fill import Progress
from model_worker.loading.loader import load_model
from model_worker.models.base import LoadedModel
from model_worker.ops.adapters import RowAdapters
from model_worker.ops.base import Ops
from model_worker.ops.selection import make_ops
from model_worker.quant.selection import select_quant_method
from runtime.base.errors import ConfigError
from runtime.checkpoint.checkpoint_config import CheckpointConfig
from runtime.checkpoint.model_config import ModelConfig, read_model_config
from runtime.settings.config import RuntimeConfig
from runtime.settings.layer_split import split_layers


class WorkerModel(NamedTuple):
    model: LoadedModel
    ops: Ops
    config: CheckpointConfig
    rows: RowAdapters | None = None
    """Table of each row's adapter; None for a model without adapters."""


def load_served_model(
    config: RuntimeConfig, device: Device, progress: Progress, group: RankGroup = SOLO, stage: int = 0
) -> WorkerModel:
    """Load this rank's part of the model (settings must be resolved); on a pipeline stage its layers. Raises
    ModelError or ConfigError.
    """
    model_path = Path(config.model)
    dtype: torch.dtype = getattr(torch, config.dtype)
    checkpoint = read_model_config(
        model_path, config.model_impl, config.context_length, config.model_spec, config.hf_overrides
    )
    if not isinstance(checkpoint, ModelConfig):
        assert group.size == 1, "settings with ranks are refused for it"
        return _by_transformers(config, checkpoint, dtype, device, progress)
    checkpoint = msgspec.structs.replace(checkpoint, max_attention_window=config.max_attention_window)
    ops = _make_ops(config, checkpoint.head_dim, dtype, device)
    rows = None
    if config.enable_lora:
        rows = ops.row_adapters(config.max_running_requests, config.max_loras, device.torch_device)
    model = load_model(
        model_path,
        checkpoint,
        dtype,
        device.torch_device,
        load_format=config.load_format,
        progress=progress,
        group=group,
        quant=select_quant_method(config.quantization, checkpoint.quantization, device.name),
        use_kv_scales=config.kv_cache_dtype != "auto",
        ops=ops,
        layers=_layers(config, checkpoint, stage),
        adapters=None if rows is None else (rows, config.max_lora_rank),
    )
    model.tap(config.additional_outputs)
    if config.deterministic and (name := model.batch_dependent()):
        raise ConfigError(f"deterministic: {name} of this model is computed by torch, in an order of its own")
    return WorkerModel(model, ops, checkpoint, rows)


def _layers(config: RuntimeConfig, checkpoint: ModelConfig, stage: int) -> range:
    if config.pp_size == 1:
        return range(0)
    return layers_of_stages(config, checkpoint)[stage]


def layers_of_stages(config: RuntimeConfig, checkpoint: ModelConfig) -> list[range]:
    """Return the layers of each pipeline stage."""
    return split_layers(checkpoint.layer_weights(), config.pp_size, config.pp_layers)


def _by_transformers(
    config: RuntimeConfig,
    checkpoint: CheckpointConfig,
    dtype: torch.dtype,
    device: Device,
    progress: Progress,
) -> WorkerModel:
    # Imported here: the library takes seconds, and a model with a spec does not need it.
    from model_worker.transformers_backend.checked_model import load_checked_model

    model, ops = load_checked_model(
        Path(config.model),
        checkpoint,
        dtype,
        device.torch_device,
        lambda head_dim: _make_ops(config, head_dim, dtype, device),
        load_format=config.load_format,
        progress=progress,
        overrides=config.hf_overrides,
        context_length=config.context_length,
    )
    if config.max_attention_window:
        model.limit_attention(config.max_attention_window)
    return WorkerModel(model, ops, checkpoint)


def _make_ops(config: RuntimeConfig, head_dim: int, dtype: torch.dtype, device: Device) -> Ops:
    return make_ops(
        config.attention_backend,
        device=device.name,
        dtype=dtype,
        head_dim=head_dim,
        deterministic=config.deterministic,
    )
