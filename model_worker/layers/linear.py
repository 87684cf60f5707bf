"""Linear layers, plain or packed: one matrix for several checkpoint matrices that read the same input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from model_worker.distributed.cut import Cut, whole
from model_worker.distributed.group import RankGroup
from model_worker.layers.bound import BoundLayer
from model_worker.layers.stored_weight import StoredWeight
from model_worker.layers.weight import Change, ExpertWeight, Weight, stacked_size
from model_worker.ops.adapters import AdaptedProduct, LayerAdapters, RowAdapters
from model_worker.ops.base import LinearWeight, Ops, Product
from model_worker.quant.base import QuantMethod
from model_worker.quant.unquantized import UNQUANTIZED


class Linear(StoredWeight, BoundLayer):
    """y = x @ weight.T + bias.

    out_features is the width of the output, or the checkpoint's module names and their widths when the layer
    packs several: Linear(hidden, {"gate_proj": 704, "up_proj": 704}) gives both outputs side by side. A width
    that is a Cut is a rank's part of the checkpoint's; so is in_features.
    """

    product: Product
    adapters: LayerAdapters | None = None
    """Adapters of the layer, if it may have any."""
    _rows: RowAdapters | None = None
    _max_rank = 0

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
        """Create uninitialised weights. one_tensor: the packed weights are one tensor in the
        checkpoint, too.
        """
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

    def take_adapters(self, rows: RowAdapters, max_rank: int) -> None:
        """Enable adapters for these rows, of rank max_rank at most. Call it before `bind`."""
        self._rows, self._max_rank = rows, max_rank

    def bind(self, ops: Ops) -> None:
        """Compute through `ops` from now on; see BoundLayer.bind."""
        self.product = ops.linear(
            LinearWeight(self.weight, self._dtype, self.weight_scale), self._fused_bias()
        )
        self.weight.packed = self.product.packs_weight
        if self._rows is not None:
            out_features, in_features = self.weight.shape
            max_parts = 1 if self.weight.one_tensor else max(1, len(self.weight.parts))
            self.adapters = ops.adapters(
                self._rows, in_features, out_features, self._dtype, self._max_rank, max_parts
            )
            self.product = AdaptedProduct(self.product, self.adapters)

    def outer_weight(self, rank: int) -> Weight:
        """Return zeros [width, rank] that can be filled and changed like the layer's own weight: an adapter's
        B.
        """
        weight: Weight = self._make(rank, dtype=self._dtype)
        weight.data.zero_()
        return weight

    def forward(self, x: Tensor) -> Tensor:
        """Return [T, width] for x [T, in_features]."""
        return self.product(x)

    def _fused_bias(self) -> Weight | None:
        """Bias that is added within the same pass."""
        return self.bias


class RowParallelLinear(Linear):
    """Linear whose input columns are divided among the ranks. The bias is added once, to the sum."""

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
        """Return [T, out_features], the same on all ranks, for x [T, the rank's part of in_features]."""
        summed = self._group.all_reduce(super().forward(x))
        return summed if self.bias is None else summed.add_(self.bias)

    def _fused_bias(self) -> None:
        return None


class ExpertLinear(StoredWeight):
    """Weights of a linear layer for each expert. The checkpoint has them under the names in `parts`."""

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
