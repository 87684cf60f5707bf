"""TritonOps: operations by Triton kernels on CUDA, and by torch for matrix products (cuBLAS)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from model_worker.attention.base import AttentionBackend
from model_worker.attention.triton import TritonAttention
from model_worker.kernels.triton.activation import activate_and_mul
from model_worker.kernels.triton.expert_choice import choose_experts
from model_worker.kernels.triton.experts import fused_experts
from model_worker.ops.adapters import RowAdapters
from model_worker.ops.base import ExpertWeights, Head, LinearWeight, MixtureOfExperts
from model_worker.ops.functions import BY_TORCH
from model_worker.ops.torch_ops import TorchOps
from model_worker.ops.triton_adapters import TritonAdapters, TritonRows
from model_worker.ops.triton_functions import BY_TRITON


class WideHead:
    """Head whose logits are the product's unrounded float32 sums."""

    batch_invariant = False
    packs_weight = False

    def __init__(self, weight: Tensor) -> None:
        self._transposed = weight.t()

    def __call__(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return logits for hidden states; see Head."""
        return torch.mm(hidden, self._transposed, out_dtype=torch.float32, out=out)


class FusedExperts:
    """Mixture of experts with all experts in the same launches. The host does not read how many tokens each
    has.
    """

    batch_invariant = False
    packs_weight = False

    def __init__(self, weights: ExpertWeights) -> None:
        self._weights = weights
        self._gate = partial(activate_and_mul, weights.activation)

    def __call__(self, hidden: Tensor, scores: Tensor) -> Tensor:
        """Mix the experts; see MixtureOfExperts."""
        each = self._weights
        weights, ids = choose_experts(
            scores[:, : each.num_experts], each.num_per_token, renormalizes=each.renormalizes
        )
        return fused_experts(
            hidden,
            each.gate_up.data,
            each.down.data,
            weights,
            ids,
            self._gate,
            gate_up_scale=each.gate_up_scale,
            down_scale=each.down_scale,
        )


class TritonOps(TorchOps):
    """Ops by Triton kernels, for CUDA."""

    name = "triton"

    def __init__(self, attention: AttentionBackend | None = None) -> None:
        """attention: None: Triton's backend."""
        super().__init__(TritonAttention() if attention is None else attention, BY_TRITON)

    def head(self, weight: LinearWeight) -> Head:
        """Make the head: logits of hidden states of the weight's dtype. See Ops."""
        if weight.dtype is torch.float32 or weight.scale is not None:
            return super().head(weight)
        self.table.note("head", BY_TORCH.name)
        return WideHead(weight.rows)

    def row_adapters(self, max_rows: int, num_slots: int, device: torch.device | str = "cpu") -> TritonRows:
        """Make the table of each row's adapter, for a model on that device with num_slots adapter slots."""
        return TritonRows(max_rows, num_slots, device)

    def adapters(
        self,
        rows: RowAdapters,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        max_rank: int,
        max_parts: int,
    ) -> TritonAdapters:
        """Make the addition of these rows' adapters to a product [T, in_features] -> [T, out_features] of
        dtype; see Ops.
        """
        self._note("adapters")
        assert isinstance(rows, TritonRows)
        return TritonAdapters(rows, in_features, out_features, dtype, max_rank, max_parts)

    def experts(self, weights: ExpertWeights) -> MixtureOfExperts:
        """Make the mixture of a layer's experts."""
        self._note("experts")
        return FusedExperts(weights)
