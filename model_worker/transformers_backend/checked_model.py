"""Loads a model of the transformers library, and compares it under our attention with the library's own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from model_worker.loading.fill import Progress
from model_worker.loading.loader import LoadFormat
from model_worker.ops.base import Ops
from model_worker.transformers_backend.load import load_transformers_model
from model_worker.transformers_backend.model import TransformersModel
from model_worker.transformers_backend.probe import find_layers
from model_worker.transformers_backend.verify import reference_logits, verify
from runtime.checkpoint.checkpoint_config import CheckpointConfig

logger = logging.getLogger(__name__)


def load_checked_model(
    model_path: Path,
    checkpoint: CheckpointConfig,
    dtype: torch.dtype,
    device: torch.device,
    make_ops: Callable[[int], Ops],
    *,
    load_format: LoadFormat,
    progress: Progress,
    overrides: str,
    context_length: int,
) -> tuple[TransformersModel, Ops]:
    """Load the model and check it. make_ops: makes the Ops for a head size. Raises ModelError."""
    logger.warning(
        "%s runs as the transformers library's own modules, which are slower than a model that we have "
        "ourselves (docs/models.md)",
        checkpoint.architecture,
    )
    hf = load_transformers_model(
        model_path, checkpoint, dtype, device, load_format, progress, overrides=overrides
    )
    reference = reference_logits(hf, checkpoint.vocab_size, context_length)
    model = TransformersModel(hf, find_layers(hf))
    ops = make_ops(model.kv_layout.head_dim)
    model.bind(ops)
    error = verify(model, ops.attention, reference, dtype)
    logger.info(
        "checked: with our attention its logits equal the library's own, within %.2g of their norm", error
    )
    return model, ops
