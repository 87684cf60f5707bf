"""Linear layers, plain or packed: one matrix for several of the checkpoint's that read the same input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model_worker.kernels.native.library import NativeKernels
from model_worker.kernels.native.operators import PackedLinear, can_pack, pack
from model_worker.layers.weight import Change, Weight


class Linear(nn.Module):
    """y = x @ weight.T + bias.

    out_features is the width of the output, or the checkpoint's module names and their widths when the layer
    packs several: Linear(hidden, {"gate_proj": 704, "up_proj": 704}) gives both outputs side by side.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Mapping[str, int],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
        changes: Sequence[Change] = (),
    ) -> None:
        super().__init__()
        parts = {} if isinstance(out_features, int) else dict(out_features)
        width = out_features if isinstance(out_features, int) else sum(out_features.values())
        self.weight = Weight(width, in_features, dtype=dtype, device=device, parts=parts, changes=changes)
        self.bias: Weight | None = None
        if bias:
            self.bias = Weight(width, dtype=dtype, device=device, parts=parts, changes=changes)
        self._packed: PackedLinear | None = None

    def use_native(self, kernels: NativeKernels) -> None:
        """Compute with the C++ kernel from now on, where it has one for this weight; weights are loaded."""
        if can_pack(kernels, self.weight):
            pack_once(kernels, self.weight)
            self._packed = PackedLinear(kernels, self.weight, self.bias, out_dtype=self.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in_features] -> [T, width]."""
        if self._packed is not None:
            return self._packed(x)
        return F.linear(x, self.weight, self.bias)


def pack_once(kernels: NativeKernels, weight: Weight) -> None:
    """Pack a weight that several layers may share."""
    if not weight.packed:
        pack(kernels, weight)
        weight.packed = True
