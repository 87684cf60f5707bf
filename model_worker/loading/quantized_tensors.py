"""QuantizedTensors: quantised tensors of a checkpoint with their scales, and how to read them as floats. An
8-bit weight has scales for the whole tensor, for each row, or for each block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model_worker.loading.safetensors_file import Rename, open_safetensors
from runtime.base.errors import ModelError
from runtime.checkpoint.quantization import CheckpointQuantization

SCALES = ("weight_scale", "weight_scale_inv")
UNUSED = ("input_scale",)
"""Fixed scales of activations. They are not used, because activations are quantised on the fly with scales of
their own.
"""
_DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8}


class QuantizedTensors:
    """Quantised tensors of a checkpoint's files. The scales are read at once, since they are small."""

    def __init__(
        self, files: list[Path], quantization: CheckpointQuantization, rename: Rename | None = None
    ) -> None:
        """Read the scales in a checkpoint's files. Raises ModelError if a file cannot be read, or a weight's
        scales are missing or have a wrong shape.
        """
        self._block = quantization.block
        self._dtypes: dict[str, torch.dtype] = {}
        self._scales: dict[str, Tensor] = {}
        shapes: dict[str, list[int]] = {}
        for path in files:
            with open_safetensors(path, rename) as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    weight = _weight_of(name, SCALES)
                    if weight is not None:
                        self._scales[weight] = file.get_tensor(name).float()
                    elif (dtype := _DTYPES.get(file.get_slice(name).get_dtype())) is not None:
                        self._dtypes[name] = dtype
                        shapes[name] = list(file.get_slice(name).get_shape())
        for name, shape in shapes.items():
            self._check(name, shape)

    def _check(self, name: str, shape: list[int]) -> None:
        scale = self._scales.get(name)
        if scale is None:
            raise ModelError(f"The checkpoint's {name} is quantised, but it has no {' or '.join(SCALES)}.")
        allowed = [[], [1], [1, 1], shape[:1], [*shape[:1], 1]]
        if self._block is not None:
            allowed.append([math.ceil(size / block) for size, block in zip(shape, self._block, strict=False)])
        if len(shape) != 2 or list(scale.shape) not in allowed:
            raise ModelError(f"The scales of {name} {shape} have the shape {list(scale.shape)}.")

    def is_companion(self, name: str) -> bool:
        """Return True if a tensor belongs to a quantised weight. It is read with the weight, or
        not needed.
        """
        weight = _weight_of(name, (*SCALES, *UNUSED))
        return weight is not None and weight in self._dtypes

    def dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype of a quantised tensor with one scale, or one for each row; None for any other."""
        if name not in self._dtypes:
            return None
        scale = self._scales[name]
        return self._dtypes[name] if scale.dim() < 2 or scale.shape[1] == 1 else None

    def expanded(self, name: str, tensor: Any, *, as_stored: bool) -> Iterator[tuple[str, Any]]:
        """Yield the forms of a file's tensor by name: as stored, with its scales [rows, 1] under a name of
        their own; or as the floats that it stands for.
        """
        if name not in self._dtypes:
            yield name, tensor
        elif as_stored:
            yield name, tensor
            rows = tensor.get_shape()[0]
            yield (
                f"{name.removesuffix('weight')}weight_scale",
                _Whole(self._scales[name].reshape(-1, 1).expand(rows, 1)),
            )
        else:
            yield name, _Dequantized(tensor, self._scales[name], self._block)


class _Whole:
    """A tensor in memory that is read like one of a file."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, where: tuple[slice, ...]) -> Tensor:
        return self._tensor[where]


class _Dequantized:
    """A quantised tensor of a file that is read as float32."""

    def __init__(self, tensor: Any, scale: Tensor, block: tuple[int, int] | None) -> None:
        self._tensor = tensor
        self._scale = scale
        self._block = block

    def get_shape(self) -> list[int]:
        return list(self._tensor.get_shape())

    def __getitem__(self, where: tuple[slice, ...]) -> Tensor:
        values: Tensor = self._tensor[where].float()
        scale = self._scale
        if scale.numel() == 1:
            return values * scale.reshape(())
        rows, columns = where
        if scale.dim() < 2 or list(scale.shape) == [self.get_shape()[0], 1]:
            return values * scale.reshape(-1, 1)[rows]
        assert self._block is not None
        height, width = self._block
        block_rows = torch.arange(rows.start, rows.stop) // height
        block_columns = torch.arange(columns.start, columns.stop) // width
        return values * scale[block_rows][:, block_columns]


def _weight_of(name: str, kinds: tuple[str, ...]) -> str | None:
    """Return the name of the weight of a scale: `a.weight` for `a.weight_scale`."""
    module, _, kind = name.rpartition(".")
    return f"{module}.weight" if kind in kinds else None
