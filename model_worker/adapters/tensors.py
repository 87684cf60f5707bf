"""Tensors of an adapter in the form that a model's layers use. An adapter that does not fit the model is
refused.

When the model's own weights were loaded they were divided among ranks, packed with others and reordered. The
same is done to the outputs of an adapter, and its inputs are divided as theirs are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from model_worker.kernels.linear import LoraPart
from model_worker.layers.linear import Linear
from model_worker.loading.tensor_names import checkpoint_name, rename_of
from model_worker.models.transformer import CausalLM
from runtime.checkpoint.adapters.lora_config import AdapterConfig, AdapterModule, refused
from runtime.checkpoint.weight_files import LENGTH_BYTES, StoredTensor, read_header

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SHOWN = 4


class AdaptedModule(NamedTuple):
    """A module of the checkpoint, and the layer that computes it, possibly together with others."""

    own_name: str
    layer: Linear


def adapted_modules(model: CausalLM) -> dict[str, AdaptedModule]:
    """Return the modules of the model's checkpoint that may have adapters, by their names there."""
    modules: dict[str, AdaptedModule] = {}
    for own_name, layer in model.adapted_layers().items():
        for name, _ in layer.outer_weight(1).targets(f"{own_name}.weight"):
            modules[checkpoint_name(model, name).removesuffix(".weight")] = AdaptedModule(own_name, layer)
    return modules


def check_fit(model: CausalLM, modules: Mapping[str, AdaptedModule], config: AdapterConfig) -> None:
    """Raise InvalidRequest, which names modules, for an adapter of another model or with missing tensors."""
    own = {own_name_of(model, each.name) for each in config.modules}
    strangers = sorted(own - modules.keys())
    if strangers:
        raise refused(config.path, f"the model has no linear layers {_shown(strangers)}")
    missing = sorted(name for name in modules.keys() - own if config.targets.names(name))
    if missing:
        raise refused(config.path, f"target_modules: there are no weights of {_shown(missing)}")
    for each in config.modules:
        layer = modules[own_name_of(model, each.name)]
        shape, wanted = (each.out_features, each.in_features), _shape_of(model, each, layer)
        if shape != wanted:
            reason = f"{each.name} is for a weight {list(shape)}, and the model's is {list(wanted)}"
            raise refused(config.path, reason)


def largest_row_bytes(model: CausalLM, modules: Mapping[str, AdaptedModule]) -> int:
    """Return the most bytes that A and B of rank 1 take for one of the modules, before division
    among ranks.
    """
    return max(
        sum(_outer_shape(model, name, where)) * where.layer.outer_weight(1).itemsize
        for name, where in modules.items()
    )


def read_parts(
    model: CausalLM, modules: Mapping[str, AdaptedModule], config: AdapterConfig
) -> Iterator[tuple[Linear, list[LoraPart]]]:
    """Read the weights of a fitting adapter, layer by layer. Raises InvalidRequest for values that are not
    finite, OSError, and ModelError.
    """
    layers: dict[AdaptedModule, list[AdapterModule]] = {}
    for each in config.modules:
        layers.setdefault(modules[own_name_of(model, each.name)], []).append(each)
    with AdapterFile(config.weights) as file:
        for where, several in layers.items():
            parts = []
            for each in several:
                a, b = (_finite(config, each, side, file.read(each.tensor(side))) for side in "AB")
                parts.append(_part(model, each, where, a, b))
            yield where.layer, sorted(parts, key=lambda part: part.column)


def own_name_of(model: CausalLM, name: str) -> str:
    """Return the checkpoint's name of a module that the PEFT library calls `name`."""
    rename = rename_of(model.config)
    renamed = name if rename is None else rename(f"{name}.weight")
    return name if renamed is None else renamed.removesuffix(".weight")


class AdapterFile:
    """A file of tensors that is read, not memory-mapped, so that a wait for the disk blocks no
    other thread.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tensors = read_header(path)
        self._file: BinaryIO = path.open("rb", buffering=0)
        self._behind_header = LENGTH_BYTES + int.from_bytes(self._file.read(LENGTH_BYTES), "little")

    def __enter__(self) -> AdapterFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, name: str) -> Tensor:
        """Read a tensor. Raises OSError if the file was replaced meanwhile."""
        entry: StoredTensor = self._tensors[name]
        tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        self._file.seek(self._behind_header + entry.data_offsets[0])
        # Untouched memory: its pages are taken while data is read into it, and other threads run meanwhile.
        view = tensor.view(-1).view(torch.uint8).numpy().data
        while view:
            num_read = self._file.readinto(view)  # type: ignore[attr-defined]
            if not num_read:
                raise OSError(0, f"{self._path.name} has become shorter")
            view = view[num_read:]
        return tensor


def _finite(config: AdapterConfig, module: AdapterModule, side: str, tensor: Tensor) -> Tensor:
    if not torch.isfinite(tensor).all():
        raise refused(config.path, f"lora_{side} of {module.name} has values that are no finite numbers")
    return tensor


def _part(model: CausalLM, module: AdapterModule, where: AdaptedModule, a: Tensor, b: Tensor) -> LoraPart:
    layer = where.layer
    outer = layer.outer_weight(module.rank)
    begins, ends = [], []
    for name, piece in outer.targets(f"{where.own_name}.weight"):
        if checkpoint_name(model, name) == f"{own_name_of(model, module.name)}.weight":
            piece.memory.copy_(b[piece.where])
            begins.append((piece.memory.data_ptr() - outer.data_ptr()) // (module.rank * outer.itemsize))
            ends.append(begins[-1] + len(piece.memory))
    outer.finish()
    columns = layer.weight.cuts[1].where
    own_a = a[:, columns].to(outer.dtype).contiguous()
    return LoraPart(min(begins), own_a, outer.data[min(begins) : max(ends)].contiguous(), module.scaling)


def _shape_of(model: CausalLM, module: AdapterModule, where: AdaptedModule) -> tuple[int, int]:
    """Return (outputs, inputs) of the module in the checkpoint, over all ranks."""
    return _outer_shape(model, own_name_of(model, module.name), where)


def _outer_shape(model: CausalLM, name: str, where: AdaptedModule) -> tuple[int, int]:
    """Return (outputs, inputs) by the module's name in the checkpoint, over all ranks."""
    shapes = [
        piece.shape
        for each, piece in where.layer.outer_weight(1).targets(f"{where.own_name}.weight")
        if checkpoint_name(model, each) == f"{name}.weight"
    ]
    return shapes[0][0], where.layer.weight.cuts[1].total


def _shown(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
