"""Loads a causal model of the transformers library by the rules of our loader: safetensors only, complete, no
code from the checkpoint.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.loading_report import LoadStateDictInfo
from transformers.utils.logging import set_tqdm_hook

from model_worker.loading.fill import Progress, refuse_faults
from model_worker.loading.loader import LoadFormat
from model_worker.transformers_backend.attention import ATTENTION_NAME
from runtime.base.errors import ModelError
from runtime.checkpoint.checkpoint_config import CheckpointConfig, config_file, read_whole_keys
from runtime.checkpoint.weight_files import weight_files

T = TypeVar("T")
logger = logging.getLogger(__name__)

_KINDS_OF_LAYER = {"full_attention", "sliding_attention"}
# These rotate a token by the longest position of the whole batch, so it would depend on other sequences.
_BATCH_ROTATIONS = {"dynamic", "longrope"}
_DUMMY_STD = 0.02


def load_transformers_model(
    model_path: Path,
    config: CheckpointConfig,
    dtype: torch.dtype,
    device: torch.device,
    load_format: LoadFormat = "auto",
    progress: Progress | None = None,
    overrides: str = "",
) -> PreTrainedModel:
    """Return the causal model with our attention function, every weight in `dtype` on `device`. overrides: as
    in CheckpointConfig. Raises ModelError for an architecture that the library does not have or our attention
    cannot serve, and for weights that are missing, unexpected or of another shape.
    """
    transformers.logging.set_verbosity_error()
    hf_config = _hf_config(model_path, overrides)
    kind = _refuse_config(hf_config, config)
    hf_config._attn_implementation = ATTENTION_NAME
    for wish in ("output_attentions", "output_hidden_states", "output_router_logits"):
        if hasattr(hf_config, wish):
            setattr(hf_config, wish, False)  # for training only
    if load_format == "dummy":
        hf: PreTrainedModel = AutoModelForCausalLM.from_config(hf_config, dtype=dtype).to(device)
        _fill_dummy(hf)
    else:
        hf = _from_files(kind, model_path, hf_config, dtype, device, progress)
    hf.eval().requires_grad_(False)
    return hf


def _hf_config(model_path: Path, overrides: str) -> PreTrainedConfig:
    try:
        if overrides:
            raw = read_whole_keys(config_file(model_path), overrides)
            return CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
        hf_config: PreTrainedConfig = AutoConfig.from_pretrained(
            model_path, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"transformers {transformers.__version__} cannot read {model_path}/config.json: "
            f"{_first_line(error)}"
        ) from error
    return hf_config


def _first_line(error: Exception) -> str:
    """Return the first line of the library's error; the rest is advice on how to install it."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _refuse_config(hf_config: PreTrainedConfig, config: CheckpointConfig) -> type[PreTrainedModel]:
    """Return the class that computes the model. Raises ModelError for a model that is known to fail, before
    weights are loaded.
    """
    prefix = f"--model-impl transformers cannot serve {config.architecture}:"
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(hf_config.model_type)
    if config.architecture not in ((known,) if isinstance(known, str) else known or ()):
        raise ModelError(
            f"{prefix} transformers {transformers.__version__} has no such decoder of text for model_type "
            f"{hf_config.model_type!r}."
        )
    kind: type[PreTrainedModel] = getattr(transformers, config.architecture)
    if not kind._can_set_attn_implementation():
        raise ModelError(f"{prefix} its attention is its own and cannot be replaced.")
    if hf_config.is_encoder_decoder or getattr(hf_config, "add_cross_attention", False):
        raise ModelError(f"{prefix} it has cross attention.")
    if getattr(hf_config, "alibi", False):
        raise ModelError(f"{prefix} its attention has ALiBi.")
    text = hf_config.get_text_config()
    others = sorted(set(getattr(text, "layer_types", None) or ()) - _KINDS_OF_LAYER)
    if others:
        raise ModelError(f"{prefix} it has layers of kind {', '.join(others)}; the KV cache is of attention.")
    rotation = _rotations(getattr(text, "rope_parameters", None) or {}) & _BATCH_ROTATIONS
    if rotation:
        raise ModelError(
            f"{prefix} with rope_type {', '.join(sorted(rotation))} a token's rotation would depend on the "
            "other sequences of its batch."
        )
    return kind


def _rotations(parameters: dict[str, Any]) -> set[str]:
    """Return the types of rotary embedding, which may differ between kinds of layers."""
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(part.get("rope_type", "default")) for part in (parameters, *nested)}


def _from_files(
    kind: type[PreTrainedModel],
    model_path: Path,
    hf_config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None,
) -> PreTrainedModel:
    weight_files(model_path)  # refuses a checkpoint without safetensors files, with a message of our own
    if (model_path / "adapter_config.json").is_file():
        raise ModelError(f"{model_path} holds an adapter (adapter_config.json); pass the model itself.")
    hf: PreTrainedModel
    info: LoadStateDictInfo | dict[str, Any]
    try:
        with _shown_by(progress):
            hf, info = kind.from_pretrained(
                model_path,
                config=hf_config,
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported below, with everything else
            )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelError(f"The weights in {model_path} cannot be loaded: {error}") from error
    _refuse_info(model_path, info)
    # Without accelerate the library loads to host memory only, so the whole model is there once.
    moved: PreTrainedModel = hf.to(device)
    return moved


def _refuse_info(model_path: Path, info: LoadStateDictInfo | dict[str, Any]) -> None:
    found = info if isinstance(info, dict) else info.to_dict()
    misshapen = [
        f"{name} {list(got)} instead of {list(wanted)}" for name, got, wanted in found["mismatched_keys"]
    ]
    refuse_faults(
        model_path, sorted(found["missing_keys"]), sorted(found["unexpected_keys"]), sorted(misshapen)
    )
    if found["error_msgs"]:
        raise ModelError(f"The weights in {model_path} cannot be loaded: {'; '.join(found['error_msgs'])}")


@contextmanager
def _shown_by(progress: Progress | None) -> Iterator[None]:
    """Context manager that counts loaded weights for `progress`, instead of the bar that transformers would
    draw.
    """

    def count(_: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Any]:
        items = args[0] if args else kwargs.get("iterable", ())
        return _counted(items, progress)

    previous = set_tqdm_hook(count)
    try:
        yield
    finally:
        set_tqdm_hook(previous)


def _counted(items: Iterable[T], progress: Progress | None) -> Iterator[T]:
    total = len(items) if isinstance(items, Sized) else 0
    for number, item in enumerate(items, 1):
        yield item
        if progress is not None and total:
            progress(number, total)


def _fill_dummy(hf: PreTrainedModel) -> None:
    """Fill weights as the native loader does: norm scales with 1, all others with normal numbers that depend
    on the parameter's name only.
    """
    for name, weight in hf.named_parameters():
        if "norm" in name and name.endswith("weight") and weight.dim() == 1:
            nn.init.ones_(weight)
            continue
        generator = torch.Generator(device=weight.device).manual_seed(zlib.crc32(name.encode()))
        weight.data.normal_(std=_DUMMY_STD, generator=generator)
