"""Filling of a model's weights: from the files of a checkpoint, or with random numbers."""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model_worker.layers.stored_weight import StoredWeight
from model_worker.layers.weight import Piece
from model_worker.loading.checkpoint_kv_scales import CheckpointKVScales
from model_worker.loading.quantized_tensors import QuantizedTensors
from model_worker.loading.safetensors_file import Rename, open_safetensors
from model_worker.loading.tensor_names import (
    checkpoint_targets,
    rename_of,
    stored_weights,
    targets_of,
    weights_of,
)
from model_worker.models.transformer import CausalLM
from runtime.base.errors import ModelError
from runtime.checkpoint.model_config import ModelConfig
from runtime.checkpoint.weight_files import first_of

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # tensors loaded so far, tensors in all

# Bytes read of a file before it is opened again, because mapped bytes count as this process's memory.
# Arbitrary.
MAPPED_BYTES = 64 << 20
_MAX_ELEMENT_BYTES = 4
_DUMMY_STD = 0.02
_DUMMY_STEPS = 32  # standard deviation of a weight of 8 bits, in units of its scale


def fill_from_files(
    model: CausalLM,
    files: list[Path],
    kv_scales: CheckpointKVScales,
    progress: Progress | None,
    elsewhere: Collection[str] = (),
) -> None:
    """Fill the model's weights from files. elsewhere: names of tensors that belong to other pipeline stages.
    Raises ModelError.
    """
    quantization = model.config.quantization
    rename = rename_of(model.config)
    quantized = None if quantization is None else QuantizedTensors(files, quantization, rename)
    _load_plain_what_is_plain(model, quantized)
    targets = checkpoint_targets(model)
    layers = _UnfinishedLayers(model)
    missing = set(targets)
    total = len(targets)
    unexpected: list[str] = []
    misshapen: list[str] = []
    tensors = ((name, tensor) for name, tensor in _tensors(files, rename) if name not in elsewhere)
    for name, tensor in _as_wanted(tensors, targets, quantized):
        if name not in targets:
            if name not in kv_scales and not _is_derived(name, model.config):
                unexpected.append(name)
            continue
        if name not in missing:
            continue  # a second copy of the tensor
        shape, wanted = list(tensor.get_shape()), list(targets[name][0].shape)
        if shape != wanted:
            misshapen.append(f"{name} {shape} instead of {wanted}")
        else:
            while targets[name]:  # a reference to the piece would keep memory alive that its layer may free
                piece = targets[name].pop()
                piece.memory.copy_(tensor[piece.where])
                del piece
        missing.discard(name)
        layers.note(name)
        if progress is not None:
            progress(total - len(missing), total)
    refuse_faults(files[0].parent, sorted(missing), unexpected, misshapen)
    layers.finish_rest()


class _UnfinishedLayers:
    """Finishes each layer with large weights as soon as all its tensors are loaded, so that few layers are
    kept in their loaded form at a time.
    """

    def __init__(self, model: CausalLM) -> None:
        self._weights = weights_of(model)
        self._own: dict[StoredWeight, list[str]] = {}
        self._missing: dict[StoredWeight, set[str]] = {}
        self._of_tensor: dict[str, list[StoredWeight]] = {}
        for module_name, layer in stored_weights(model).items():
            own = [name for name, _ in layer.named_parameters(module_name, recurse=False)]
            wanted = {name for each in own for name, _ in targets_of(model, each, self._weights[each])}
            self._own[layer] = own
            self._missing[layer] = wanted
            for name in wanted:
                self._of_tensor.setdefault(name, []).append(layer)

    def note(self, name: str) -> None:
        """Record that a tensor was read."""
        for layer in self._of_tensor.get(name, ()):
            self._missing[layer].discard(name)
            if not self._missing[layer]:
                for own_name in self._own[layer]:
                    self._weights.pop(own_name).finish()
                layer.compress()

    def finish_rest(self) -> None:
        """Finish the remaining layers, when everything was read."""
        for weight in self._weights.values():
            weight.finish()


def _load_plain_what_is_plain(model: CausalLM, quantized: QuantizedTensors | None) -> None:
    """Prepare layers that a quantised checkpoint has in the model's dtype. Other quantised layers that cannot
    be stored as they are will be dequantised to it.
    """
    num_dequantised = 0
    for name, layer in stored_weights(model).items():
        stored = layer.quant.stored
        if stored is not None:
            tensors = [each for each, _ in targets_of(model, f"{name}.weight", layer.weight)]
            is_stored = quantized is not None and all(quantized.dtype(each) is stored for each in tensors)
            if not (is_stored and layer.quant.can_store(layer.weight)):
                num_dequantised += is_stored
                layer.load_plain()
    if num_dequantised:
        logger.info("dequantised as they are loaded, because of their sizes: %d layers", num_dequantised)


def _as_wanted(
    tensors: Iterable[tuple[str, Any]], targets: Mapping[str, list[Piece]], quantized: QuantizedTensors | None
) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a quantised checkpoint in the form that the model's weights take; those of any
    other checkpoint unchanged.
    """
    for name, tensor in tensors:
        if quantized is None:
            yield name, tensor
        elif not quantized.is_companion(name):
            pieces = targets.get(name)
            as_stored = bool(pieces and pieces[0].memory.dtype is quantized.dtype(name))
            yield from quantized.expanded(name, tensor, as_stored=as_stored)


def _tensors(files: Iterable[Path], rename: Rename | None) -> Iterator[tuple[str, Any]]:
    """Yield every tensor of the files under its name here, as a safetensors slice that is read when it is
    indexed. Reading maps the file's pages into this process, and only closing the file releases them.
    """
    for path in files:
        names: list[str] = []
        is_first = True
        while is_first or names:
            with open_safetensors(path, rename) as file:
                if is_first:
                    names, is_first = list(file.keys()), False
                mapped = 0
                while names and mapped < MAPPED_BYTES:
                    tensor = file.get_slice(names[0])
                    yield names.pop(0), tensor
                    mapped += math.prod(tensor.get_shape()) * _MAX_ELEMENT_BYTES


def _is_derived(name: str, config: ModelConfig) -> bool:
    """Return True if a checkpoint tensor may be ignored, because the model has its content from elsewhere."""
    if name.endswith("rotary_emb.inv_freq"):
        return True
    return config.tie_word_embeddings and name == "lm_head.weight"


def refuse_faults(path: Path, missing: list[str], unexpected: list[str], misshapen: list[str]) -> None:
    faults = [
        f"{kind}: {first_of(names)}"
        for kind, names in (("missing", missing), ("unexpected", unexpected), ("wrong shape", misshapen))
        if names
    ]
    if faults:
        raise ModelError(f"The weights in {path} do not match its config.json. {'; '.join(faults)}.")


def fill_dummy(model: CausalLM) -> None:
    """Fill weights with random numbers: norm scales become 1, all others normal with a small deviation,
    quantised weights too. A whole tensor is drawn and then divided, so that any number of ranks have parts of
    the same model.
    """
    for name, pieces in checkpoint_targets(model).items():
        dummy = _dummy(name, pieces[0])
        for piece in pieces:
            piece.memory.copy_(dummy[piece.where])


def _dummy(name: str, piece: Piece) -> Tensor:
    like = piece.memory
    if name.endswith("norm.weight"):
        return like.new_ones(()).expand(piece.shape)
    if name.endswith(".weight_scale"):
        return like.new_full((), _DUMMY_STD / _DUMMY_STEPS).expand(piece.shape)
    generator = torch.Generator(device=like.device).manual_seed(zlib.crc32(name.encode()))
    if like.itemsize > 1:
        drawn = torch.empty(piece.shape, dtype=like.dtype, device=like.device)
        return drawn.normal_(std=_DUMMY_STD, generator=generator)
    drawn = torch.empty(piece.shape, dtype=torch.float32, device=like.device)
    return drawn.normal_(std=_DUMMY_STEPS, generator=generator).clamp_(-127.0, 127.0)
