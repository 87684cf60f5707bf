"""Linear layers, plain or packed: one matrix for several of the checkpoint's that read the same input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from model_worker.distributed.cut import Cut, whole
from model_worker.distributed.group import RankGroup
from model_worker.kernels.native.library import NativeKernels
from model_worker.kernels.native.operators import PackedLinear
from model_worker.layers.stored_weight import StoredWeight
from model_worker.layers.weight import Change, ExpertWeight, Weight, stacked_size
from model_worker.quant.base import Multiply, QuantMethod
from model_worker.quant.unquantized import UNQUANTIZED
from runtime.checkpoint.model_config import Activation


class Linear(StoredWeight):
    """y = x @ weight.T + bias.

    out_features is the width of the output, or the checkpoint's module names and their widths when the layer
    packs several: Linear(hidden, {"gate_proj": 704, "up_proj": 704}) gives both outputs side by side. A width
    that is a Cut is a rank's part of the checkpoint's; so is in_features.
    """

    def __init__(
        self,
        in_features: int | Cut,
        out_features: int | Cut | Mapping[str, int | Cut],
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
        one_tensor: bool = False,
        changes: Sequence[Change] = (),
        quant: QuantMethod = UNQUANTIZED,
    ) -> None:
        """one_tensor: what the layer packs is packed in the checkpoint too."""
        parts: dict[str, Cut] = {}
        width: int | Cut
        if isinstance(out_features, Mapping):
            parts = {
                name: size if isinstance(size, Cut) else whole(size) for name, size in out_features.items()
            }
            width = stacked_size(parts)
        else:
            width = out_features
        make = partial(Weight, width, device=device, parts=parts, one_tensor=one_tensor, changes=changes)
        super().__init__(make, in_features, dtype, quant)
        self.bias: Weight | None = make(dtype=dtype) if bias else None
        self._native: Multiply | None = None

    def use_native(self, kernels: NativeKernels) -> None:
        """Compute with the C++ kernel from now on, where it has one for this weight; weights are loaded."""
        self._native = self.quant.native(
            kernels, self.weight.data, self.weight_scale, self._fused_bias(), self._dtype
        )
        self.weight.packed = self._native is not None

    @property
    def is_packed(self) -> bool:
        """The C++ kernel computes it."""
        return self._native is not None

    def gated(self, activation: Activation) -> Multiply | None:
        """After use_native, of a layer whose halves are a gate and what it multiplies: both and the gate as
        one kernel, x [T, in_features] -> [T, width / 2]. None where there is no such kernel.
        """
        return self._native.gated(activation) if isinstance(self._native, PackedLinear) else None

    def forward(self, x: Tensor) -> Tensor:
        """x [T, in_features] -> [T, width]."""
        if self._native is not None:
            return self._native(x)
        return self.quant.apply(x, self.weight, self.weight_scale, self._fused_bias())

    def _fused_bias(self) -> Weight | None:
        """What is added in the same pass."""
        return self.bias


class RowParallelLinear(Linear):
    """A Linear of which each rank has some of the input's columns. The bias is added to the sum, once."""

    def __init__(
        self,
        in_features: Cut,
        out_features: int,
        *,
        group: RankGroup,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device | str,
        quant: QuantMethod = UNQUANTIZED,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, dtype=dtype, device=device, quant=quant)
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        """x [T, the rank's part of in_features] -> [T, out_features], the same on all ranks."""
        summed = self._group.all_reduce(super().forward(x))
        return summed if self.bias is None else summed.add_(self.bias)

    def _fused_bias(self) -> None:
        return None


class ExpertLinear(StoredWeight):
    """A Linear for each expert, of what they have in the checkpoint under the names in `parts`."""

    def __init__(
        self,
        num_experts: int,
        in_features: int | Cut,
        parts: Mapping[str, Cut],
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        quant: QuantMethod,
    ) -> None:
        make = partial(ExpertWeight, num_experts, stacked_size(parts), device=device, parts=parts)
        super().__init__(make, in_features, dtype, quant)
        self._native: list[Multiply] = []

    def use_native(self, kernels: NativeKernels) -> None:
        """Compute with the C++ kernel from now on, where it has one for this weight; weights are loaded."""
        for expert in range(len(self.weight)):
            native = self.quant.native(
                kernels, self.weight.data[expert], self._scale(expert), None, self._dtype
            )
            if native is None:
                return
            self._native.append(native)
        self.weight.packed = True

    def forward(self, expert: int, x: Tensor) -> Tensor:
        """x [n, in_features] -> [n, width] of that expert."""
        if self._native:
            return self._native[expert](x)
        return self.quant.apply(x, self.weight[expert], self._scale(expert), None)

    def _scale(self, expert: int) -> Tensor | None:
        return None if self.weight_scale is None else self.weight_scale.data[expert]
