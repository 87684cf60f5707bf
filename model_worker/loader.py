"""Builds a model and fills its weights from a checkpoint. Safetensors only: no pickle, no remote code.

Knows files and tensor names; which tensors a model wants, and where they go, its parameters say.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model_worker.layers.weight import Weight
from model_worker.models.spec import ModelSpec
from model_worker.models.transformer import CausalLM
from runtime.errors import ModelError
from runtime.model_config import ModelConfig
from runtime.registry import resolve

LoadFormat = Literal["auto", "safetensors", "dummy"]
Progress = Callable[[int, int], None]  # tensors loaded so far, tensors in all

INDEX_FILE = "model.safetensors.index.json"
_DUMMY_STD = 0.02
_NAMES_SHOWN = 8  # of each kind of fault, so that a wrong checkpoint does not print thousands of lines


def load_model(
    model_path: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    load_format: LoadFormat = "auto",
    progress: Progress | None = None,
) -> CausalLM:
    """Build the model on `device` with every weight in `dtype`, whatever the checkpoint's.

    "auto" and "safetensors" read the *.safetensors files of model_path, one tensor at a time straight into
    its place, so that the peak is the model and one tensor. "dummy" reads nothing and fills the weights with
    small random numbers that depend on the parameter's name alone.
    Raises: ModelError that lists the weights that are missing, unexpected or of another shape; then no model.
    """
    spec = resolve("model architecture", config.spec, {})
    assert isinstance(spec, ModelSpec)
    model = CausalLM(config, spec, dtype=dtype, device=device)
    if load_format == "dummy":
        _fill_dummy(model)
    else:
        _fill_from_files(model, _weight_files(model_path), progress)
        for weight in _weights(model).values():
            weight.finish()
    return model


def checkpoint_targets(model: CausalLM) -> dict[str, Tensor]:
    """Every checkpoint tensor the model needs, by name, with the memory it fills."""
    targets: dict[str, Tensor] = {}
    for name, weight in _weights(model).items():
        targets.update(weight.targets(name))
    return {model.spec.checkpoint_name(name): target for name, target in targets.items()}


def _weights(model: CausalLM) -> dict[str, Weight]:
    weights: dict[str, Weight] = {}
    for name, weight in model.named_parameters():
        assert isinstance(weight, Weight)
        weights[name] = weight
    return weights


def _weight_files(model_path: Path) -> list[Path]:
    """The checkpoint's files: those its index names, or else every *.safetensors in the directory."""
    index = model_path / INDEX_FILE
    if index.is_file():
        try:
            weight_map = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ModelError(f"{index} cannot be read: {error}") from error
        names = sorted(set(weight_map.values()))
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise ModelError(f"{index} names files outside the model directory: {_shown(outside)}.")
        missing = [name for name in names if not (model_path / name).is_file()]
        if missing:
            raise ModelError(f"{model_path} lacks files that its index names: {_shown(missing)}.")
        return [model_path / name for name in names]
    # Some checkpoints carry the same weights again as "consolidated", in their authors' own layout.
    files = [path for path in sorted(model_path.glob("*.safetensors")) if "consolidated" not in path.name]
    if not files:
        raise ModelError(
            f"{model_path} has no *.safetensors file. Other formats are not read: convert the checkpoint, "
            "or use the load format 'dummy' for random weights."
        )
    return files


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _fill_from_files(model: CausalLM, files: list[Path], progress: Progress | None) -> None:
    targets = checkpoint_targets(model)
    missing = set(targets)
    total = len(targets)
    unexpected: list[str] = []
    misshapen: list[str] = []
    for name, tensor in _tensors(files):
        target = targets.get(name)
        if target is None:
            if not _is_derived(name, model.config):
                unexpected.append(name)
            continue
        if tensor.shape != target.shape:
            misshapen.append(f"{name} {list(tensor.shape)} instead of {list(target.shape)}")
        else:
            target.copy_(tensor)
        missing.discard(name)
        if progress is not None:
            progress(total - len(missing), total)
    _refuse_faults(files[0].parent, sorted(missing), unexpected, misshapen)


def _tensors(files: Iterable[Path]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the files, read from disk when it is its turn."""
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping, only keys() exists
                    yield name, file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path} cannot be read: {error}. Download the checkpoint again.") from error


def _is_derived(name: str, config: ModelConfig) -> bool:
    """Whether a checkpoint tensor may be ignored: it repeats what the model has from elsewhere."""
    if name.endswith("rotary_emb.inv_freq"):
        return True
    return config.tie_word_embeddings and name == "lm_head.weight"


def _refuse_faults(path: Path, missing: list[str], unexpected: list[str], misshapen: list[str]) -> None:
    faults = [
        f"{kind}: {_shown(names)}"
        for kind, names in (("missing", missing), ("unexpected", unexpected), ("wrong shape", misshapen))
        if names
    ]
    if faults:
        raise ModelError(f"The weights in {path} do not match its config.json. {'; '.join(faults)}.")


def _shown(names: list[str]) -> str:
    rest = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _fill_dummy(model: CausalLM) -> None:
    """Norm scales become one, everything else normal with a small deviation."""
    for name, weight in model.named_parameters():
        if name.endswith("norm.weight"):
            weight.data.fill_(1.0)
            continue
        generator = torch.Generator(device=weight.device).manual_seed(zlib.crc32(name.encode()))
        weight.data.normal_(std=_DUMMY_STD, generator=generator)
