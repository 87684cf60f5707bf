"""Feed-forward half of a layer: gated, plain, or a mixture of gated experts."""

from __future__ import annotations

from torch import Tensor, nn

from model_worker.distributed.cut import padded, whole
from model_worker.layers.bound import BoundLayer
from model_worker.models.parts import Parts
from model_worker.models.spec import has_bias
from model_worker.ops.base import ExpertWeights, Map, MixtureOfExperts, Ops
from runtime.checkpoint.model_config import ExpertsConfig


def make_feed_forward(parts: Parts, layer_id: int) -> nn.Module:
    """Make the feed-forward module of a layer according to config and spec. It maps hidden [T, hidden_size]
    to [T, hidden_size].
    """
    config = parts.config
    if config.experts is not None and config.expert_layers[layer_id]:
        return (SparseMLP if parts.group.size == 1 else ParallelSparseMLP)(parts, config.experts)
    return GatedMLP(parts) if parts.spec.gated_mlp else PlainMLP(parts)


class GatedMLP(BoundLayer):
    """Gated feed-forward: down(act(gate(x)) * up(x))."""

    _gated: Map

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        config = parts.config
        bias = has_bias(parts.spec.mlp_bias, config.mlp_bias)
        width = parts.even(config.intermediate_size)
        self.gate_up_proj = parts.linear(
            config.hidden_size, {"gate_proj": width, "up_proj": width}, bias=bias
        )
        self.down_proj = parts.joining_linear(width, config.hidden_size, bias=bias)
        self._activation = config.hidden_act
        self._width = width.length

    def bind(self, ops: Ops) -> None:
        """Compute through `ops` from now on; its linear layers must be bound before. See BoundLayer.bind."""
        self._gated = ops.gated(self.gate_up_proj.product, self._activation, self._width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return [T, hidden_size] for hidden [T, hidden_size]."""
        projected: Tensor = self.down_proj(self._gated(hidden))
        return projected


class PlainMLP(BoundLayer):
    """Feed-forward without gate: down(act(up(x)))."""

    _activate: Map

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        config = parts.config
        bias = has_bias(parts.spec.mlp_bias, config.mlp_bias)
        width = parts.even(config.intermediate_size)
        self.up_proj = parts.linear(config.hidden_size, width, bias=bias)
        self.down_proj = parts.joining_linear(width, config.hidden_size, bias=bias)
        self._activation = config.hidden_act
        self._width = width.length

    def bind(self, ops: Ops) -> None:
        """Compute through `ops` from now on; see BoundLayer.bind."""
        self._activate = ops.activation(self._activation, self._width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return [T, hidden_size] for hidden [T, hidden_size]."""
        projected: Tensor = self.down_proj(self._activate(self.up_proj(hidden)))
        return projected


class Experts(nn.Module):
    """Stacked weights of the experts: this rank's part of each expert's inner dimension."""

    def __init__(self, parts: Parts, experts: ExpertsConfig) -> None:
        super().__init__()
        hidden, width = parts.config.hidden_size, parts.even(experts.intermediate_size)
        gate_up = {"gate_proj": width, "up_proj": width}
        self.gate_up_proj = parts.expert_linear(experts.num_experts, hidden, gate_up)
        self.down_proj = parts.expert_linear(experts.num_experts, width, {"down_proj": whole(hidden)})


class SparseMLP(BoundLayer):
    """Mixture of experts: each token goes through the experts that the router scores highest, weighted by the
    scores.
    """

    mixture: MixtureOfExperts

    def __init__(self, parts: Parts, experts: ExpertsConfig) -> None:
        super().__init__()
        # The router's output is padded to the kernel's width; the columns after the experts are unused.
        self.router = parts.linear(
            parts.config.hidden_size, padded(experts.num_experts), bias=False, quantized=False
        )
        self.experts = Experts(parts, experts)
        self._activation = parts.config.hidden_act
        self._dtype = parts.dtype
        self._num_per_token = experts.num_per_token
        self._renormalizes = experts.renormalize

    def bind(self, ops: Ops) -> None:
        """Compute through `ops` from now on; see BoundLayer.bind."""
        gate_up, down = self.experts.gate_up_proj, self.experts.down_proj
        self.mixture = ops.experts(
            ExpertWeights(
                gate_up.weight,
                down.weight,
                gate_up.weight_scale,
                down.weight_scale,
                activation=self._activation,
                dtype=self._dtype,
                num_per_token=self._num_per_token,
                renormalizes=self._renormalizes,
            )
        )
        gate_up.weight.packed = down.weight.packed = self.mixture.packs_weight

    def forward(self, hidden: Tensor) -> Tensor:
        """Return [T, hidden_size] for hidden [T, hidden_size]."""
        return self.mixture(hidden, self.router(hidden))


class ParallelSparseMLP(SparseMLP):
    """SparseMLP whose experts are each divided among the ranks. The ranks' results are summed once, over all
    experts.
    """

    def __init__(self, parts: Parts, experts: ExpertsConfig) -> None:
        super().__init__(parts, experts)
        self._group = parts.group

    def forward(self, hidden: Tensor) -> Tensor:
        """Return [T, hidden_size], the same on all ranks, for hidden [T, hidden_size]."""
        return self._group.all_reduce(super().forward(hidden))
