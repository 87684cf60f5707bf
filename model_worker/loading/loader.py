"""Builds a model and fills its weights from a checkpoint. Safetensors only: no pickle, no remote code. Knows
files and tensor names; the model's parameters say which tensors they need, and where.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
import torch

from model_worker.distributed.group import SOLO, RankGroup
from model_worker.loading.checkpoint_kv_scales import CheckpointKVScales
from model_worker.loading.fill import Progress, fill_dummy, fill_from_files
from model_worker.loading.tensor_names import attention_layers, checkpoint_targets, rename_of, stored_weights
from model_worker.loading.text_part_files import has_own_head, log_what_is_left_out
from model_worker.models.parts import Parts
from model_worker.models.spec import resolve_spec
from model_worker.models.transformer import CausalLM
from model_worker.ops.adapters import RowAdapters
from model_worker.ops.base import Ops
from model_worker.ops.torch_ops import TorchOps
from model_worker.quant.base import QuantMethod
from model_worker.quant.unquantized import UNQUANTIZED
from runtime.checkpoint.model_config import ModelConfig
from runtime.checkpoint.weight_files import weight_files

LoadFormat = Literal["auto", "dummy"]


def load_model(
    model_path: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    load_format: LoadFormat = "auto",
    *,
    progress: Progress | None = None,
    group: RankGroup = SOLO,
    quant: QuantMethod = UNQUANTIZED,
    use_kv_scales: bool = False,
    ops: Ops | None = None,
    adapters: tuple[RowAdapters, int] | None = None,
    layers: range = range(0),
) -> CausalLM:
    """Build this rank's part of the model on `device`. All weights have `dtype`, whatever the checkpoint's,
    except those of linear layers, and of a compressed head, which are stored as `quant` says.

    - load_format: "auto" and "safetensors" read the *.safetensors files of model_path. Only this rank's part
      of each tensor is read, directly into its place, so that peak memory is the rank's weights plus
      MAPPED_BYTES or one tensor. "dummy" fills weights with small random numbers that only depend on the
      tensor's name.
    - use_kv_scales: the KV cache will be float8, so layers take the scales that the checkpoint may have.
    - ops: implementation of the layers' operations; None: torch's. adapters: table of rows and largest rank;
      None: no adapters. layers: those of this pipeline stage; empty: all.

    Raises ModelError, which lists weights that are missing, unexpected or of another shape.
    """
    spec = resolve_spec(config.spec)
    files = [] if load_format == "dummy" else weight_files(model_path)
    rename = rename_of(config)
    if rename is not None and config.tie_word_embeddings and has_own_head(files, rename, spec):
        config = msgspec.structs.replace(config, tie_word_embeddings=False)
    model = CausalLM(Parts(config, spec, dtype, device, group, quant, layers))
    if load_format == "dummy":
        fill_dummy(model)
        for layer in stored_weights(model).values():
            layer.compress()
    else:
        if rename is not None and group.rank == 0:
            log_what_is_left_out(files, rename)
        whole = model if not layers else CausalLM(Parts(config, spec, dtype, "meta", quant=quant))
        kv_scales = CheckpointKVScales(files, list(attention_layers(whole)), rename)
        elsewhere = checkpoint_targets(whole).keys() - checkpoint_targets(model).keys()
        fill_from_files(model, files, kv_scales, progress, elsewhere)
        if use_kv_scales:
            for attention, kv_scale in zip(
                attention_layers(model).values(), kv_scales.by_layer(), strict=True
            ):
                attention.scale_kv(kv_scale)
        else:
            kv_scales.log_unused()
    if config.has_head:
        model.compress_head()
    if adapters is not None:
        model.take_adapters(*adapters)
    model.bind(TorchOps() if ops is None else ops)
    return model
