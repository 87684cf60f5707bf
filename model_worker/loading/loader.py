"""Builds a model and fills its weights from a checkpoint. Safetensors only: no pickle, no remote code.

Knows files and tensor names; which tensors a model wants, and where they go, its parameters say.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from model_worker.distributed.group import SOLO, RankGroup
from model_worker.layers.stored_weight import StoredWeight
from model_worker.layers.weight import Piece, Weight
from model_worker.loading.checkpoint_kv_scales import CheckpointKVScales
from model_worker.loading.quantized_tensors import QuantizedTensors
from model_worker.loading.safetensors_file import Rename, open_safetensors
from model_worker.loading.text_part_files import has_own_head, log_what_is_left_out
from model_worker.models.attention import SelfAttention
from model_worker.models.spec import ModelSpec
from model_worker.models.transformer import CausalLM
from model_worker.ops.adapters import RowAdapters
from model_worker.ops.base import Ops
from model_worker.ops.torch_ops import TorchOps
from model_worker.quant.base import QuantMethod
from model_worker.quant.unquantized import UNQUANTIZED
from runtime.base.errors import ModelError
from runtime.base.registry import resolve
from runtime.checkpoint.model_config import ModelConfig
from runtime.checkpoint.weight_files import weight_files

logger = logging.getLogger(__name__)

LoadFormat = Literal["auto", "dummy"]
Progress = Callable[[int, int], None]  # tensors loaded so far, tensors in all

# Of a file, before it is opened anew: what is mapped counts as this process's memory. Arbitrary.
MAPPED_BYTES = 64 << 20
_MAX_ELEMENT_BYTES = 4
_DUMMY_STD = 0.02
_DUMMY_STEPS = 32  # standard deviation of a weight of 8 bits, in units of its scale
_NAMES_SHOWN = 8  # of each kind of fault, so that a wrong checkpoint does not print thousands of lines


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
) -> CausalLM:
    """Build this rank's part of the model on `device`, every weight in `dtype`, whatever the checkpoint's;
    those of linear layers, and of a head made smaller at load, as `quant` stores them.

    "auto" and "safetensors" read the *.safetensors files of model_path, of each tensor what this rank has,
    straight into its place, so that the peak is the rank's weights and MAPPED_BYTES or one tensor. "dummy"
    reads nothing and fills the weights with small random numbers that depend on the tensor's name alone.
    use_kv_scales: the KV cache will be of float8, so layers take the scales that the checkpoint may have.
    ops: what it computes by; torch's when not given. adapters: of rows, and their largest rank; None: it has
    none.
    Raises: ModelError that lists the weights that are missing, unexpected or of another shape; then no model.
    """
    spec = resolve("model architecture", config.spec, {})
    assert isinstance(spec, ModelSpec)
    files = [] if load_format == "dummy" else weight_files(model_path)
    rename = rename_of(config)
    if rename is not None and config.tie_word_embeddings and has_own_head(files, rename, spec):
        config = msgspec.structs.replace(config, tie_word_embeddings=False)
    model = CausalLM(config, spec, dtype=dtype, device=device, group=group, quant=quant)
    if load_format == "dummy":
        _fill_dummy(model)
        for layer in _stored_weights(model).values():
            layer.compress()
    else:
        if rename is not None and group.rank == 0:
            log_what_is_left_out(files, rename)
        kv_scales = CheckpointKVScales(files, list(_attention(model)), rename)
        _fill_from_files(model, files, kv_scales, progress)
        if use_kv_scales:
            for attention, kv_scale in zip(_attention(model).values(), kv_scales.by_layer(), strict=True):
                attention.scale_kv(kv_scale)
        else:
            kv_scales.log_unused()
    if config.has_head:
        model.lm_head.compress()
    if adapters is not None:
        model.take_adapters(*adapters)
    model.bind(TorchOps() if ops is None else ops)
    return model


def rename_of(config: ModelConfig) -> Rename | None:
    """The names that tensors of a multimodal checkpoint have in the decoder; None for any other."""
    return None if config.text_part is None else config.text_part.decoder_name


def checkpoint_targets(model: CausalLM) -> dict[str, list[Piece]]:
    """Every checkpoint tensor the model needs, by name, with the pieces of it and the memory they fill."""
    targets: dict[str, list[Piece]] = {}
    for own_name, weight in _weights(model).items():
        for name, piece in _targets(model, own_name, weight):
            targets.setdefault(name, []).append(piece)
    return targets


def _targets(model: CausalLM, own_name: str, weight: Weight) -> Iterator[tuple[str, Piece]]:
    """Weight.targets, in the checkpoint's own spelling."""
    for name, piece in weight.targets(own_name):
        yield checkpoint_name(model, name), piece


def checkpoint_name(model: CausalLM, name: str) -> str:
    """Return the checkpoint's own spelling of a tensor's name."""
    # A decoder that was saved without a head has the same names, but for the module around it.
    prefix = "" if model.config.has_head else "model."
    return model.spec.checkpoint_name(name).removeprefix(prefix)


def _attention(model: CausalLM) -> dict[str, SelfAttention]:
    """Return the attention of each layer by its name in the checkpoint, in the order of the layers."""
    modules = {name: each for name, each in model.named_modules() if isinstance(each, SelfAttention)}
    return {checkpoint_name(model, name): each for name, each in modules.items()}


def _stored_weights(model: CausalLM) -> dict[str, StoredWeight]:
    return {name: module for name, module in model.named_modules() if isinstance(module, StoredWeight)}


def _weights(model: CausalLM) -> dict[str, Weight]:
    weights: dict[str, Weight] = {}
    for name, weight in model.named_parameters():
        assert isinstance(weight, Weight)
        weights[name] = weight
    return weights


def _fill_from_files(
    model: CausalLM, files: list[Path], kv_scales: CheckpointKVScales, progress: Progress | None
) -> None:
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
    for name, tensor in _as_wanted(_tensors(files, rename), targets, quantized):
        if name not in targets:
            if name not in kv_scales and not _is_derived(name, model.config):
                unexpected.append(name)
            continue
        if name not in missing:
            continue  # a second copy
        shape, wanted = list(tensor.get_shape()), list(targets[name][0].shape)
        if shape != wanted:
            misshapen.append(f"{name} {shape} instead of {wanted}")
        else:
            while targets[name]:  # a piece keeps the memory alive that its layer may give back
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
    """Finishes each layer of large weights as soon as all its tensors are there, so that few are held as they
    were loaded.
    """

    def __init__(self, model: CausalLM) -> None:
        self._weights = _weights(model)
        self._own: dict[StoredWeight, list[str]] = {}
        self._missing: dict[StoredWeight, set[str]] = {}
        self._of_tensor: dict[str, list[StoredWeight]] = {}
        for module_name, layer in _stored_weights(model).items():
            own = [name for name, _ in layer.named_parameters(module_name, recurse=False)]
            wanted = {name for each in own for name, _ in _targets(model, each, self._weights[each])}
            self._own[layer] = own
            self._missing[layer] = wanted
            for name in wanted:
                self._of_tensor.setdefault(name, []).append(layer)

    def note(self, name: str) -> None:
        """The tensor has been read."""
        for layer in self._of_tensor.get(name, ()):
            self._missing[layer].discard(name)
            if not self._missing[layer]:
                for own_name in self._own[layer]:
                    self._weights.pop(own_name).finish()
                layer.compress()

    def finish_rest(self) -> None:
        """Everything has been read."""
        for weight in self._weights.values():
            weight.finish()


def _load_plain_what_is_plain(model: CausalLM, quantized: QuantizedTensors | None) -> None:
    """Quantised checkpoints have some layers in the model's dtype; others are dequantised to it."""
    num_dequantised = 0
    for name, layer in _stored_weights(model).items():
        stored = layer.quant.stored
        if stored is not None:
            tensors = [each for each, _ in _targets(model, f"{name}.weight", layer.weight)]
            is_stored = quantized is not None and all(quantized.dtype(each) is stored for each in tensors)
            if not (is_stored and layer.quant.can_store(layer.weight)):
                num_dequantised += is_stored
                layer.load_plain()
    if num_dequantised:
        logger.info("dequantised as they are loaded, because of their sizes: %d layers", num_dequantised)


def _as_wanted(
    tensors: Iterable[tuple[str, Any]], targets: Mapping[str, list[Piece]], quantized: QuantizedTensors | None
) -> Iterator[tuple[str, Any]]:
    """The tensors of a quantised checkpoint as the model's weights take them; of any other as they are."""
    for name, tensor in tensors:
        if quantized is None:
            yield name, tensor
        elif not quantized.is_companion(name):
            pieces = targets.get(name)
            as_stored = bool(pieces and pieces[0].memory.dtype is quantized.dtype(name))
            yield from quantized.expanded(name, tensor, as_stored=as_stored)


def _tensors(files: Iterable[Path], rename: Rename | None) -> Iterator[tuple[str, Any]]:
    """Every tensor of the files by its name here, as a safetensors slice that is read where it is indexed.

    Reading maps a file's pages into this process, and only closing the file lets go of them.
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
    """Tell whether a checkpoint tensor may be ignored: it repeats what the model has from elsewhere."""
    if name.endswith("rotary_emb.inv_freq"):
        return True
    return config.tie_word_embeddings and name == "lm_head.weight"


def refuse_faults(path: Path, missing: list[str], unexpected: list[str], misshapen: list[str]) -> None:
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
    """Norm scales become one, everything else normal with a small deviation, quantised weights too. A whole
    tensor is drawn and cut, so that the ranks of any number have parts of the same model.
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
