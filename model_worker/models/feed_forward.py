"""The feed-forward half of a layer: gated, plain, or a mixture of gated experts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from model_worker.distributed.cut import padded, whole
from model_worker.kernels.activation import ACTIVATIONS, activate_and_mul
from model_worker.kernels.expert_choice import choose_experts
from model_worker.kernels.native.experts import ExpertScratch, NativeExperts
from model_worker.kernels.native.library import NativeKernels
from model_worker.kernels.native.operators import LANES, Activate
from model_worker.kernels.native.program import NotRecordable
from model_worker.models.parts import Parts
from model_worker.models.spec import has_bias
from model_worker.quant.base import Multiply
from runtime.checkpoint.model_config import ExpertsConfig

logger = logging.getLogger(__name__)


def make_feed_forward(parts: Parts, layer_id: int) -> nn.Module:
    """What the layer has, by the config and the spec: hidden [T, hidden_size] -> [T, hidden_size]."""
    config = parts.config
    if config.experts is not None and config.expert_layers[layer_id]:
        return (SparseMLP if parts.group.size == 1 else ParallelSparseMLP)(parts, config.experts)
    return GatedMLP(parts) if parts.spec.gated_mlp else PlainMLP(parts)


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

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
        self._activate: Callable[[Tensor], Tensor] = partial(activate_and_mul, config.hidden_act)
        self._gated: Multiply | None = None
        self._width = width.length

    def use_native(self, kernels: NativeKernels) -> None:
        """Compute the gate with the C++ kernel from now on, where it has one for this width; in one with the
        product before it where there is such a kernel. Its own layers use theirs already.
        """
        if self._width % LANES == 0:
            self._activate = Activate(kernels, self._activation, has_up=True)
            self._gated = self.gate_up_proj.gated(self._activation)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [T, hidden_size] -> [T, hidden_size]."""
        gated = self._activate(self.gate_up_proj(hidden)) if self._gated is None else self._gated(hidden)
        projected: Tensor = self.down_proj(gated)
        return projected


class PlainMLP(nn.Module):
    """down(act(up(x)))."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        config = parts.config
        bias = has_bias(parts.spec.mlp_bias, config.mlp_bias)
        width = parts.even(config.intermediate_size)
        self.up_proj = parts.linear(config.hidden_size, width, bias=bias)
        self.down_proj = parts.joining_linear(width, config.hidden_size, bias=bias)
        self._activation = config.hidden_act
        self._activate = ACTIVATIONS[config.hidden_act]
        self._width = width.length

    def use_native(self, kernels: NativeKernels) -> None:
        """Compute the activation with the C++ kernel from now on, where it has one for this width."""
        if self._width % LANES == 0:
            self._activate = Activate(kernels, self._activation, has_up=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [T, hidden_size] -> [T, hidden_size]."""
        projected: Tensor = self.down_proj(self._activate(self.up_proj(hidden)))
        return projected


class Experts(nn.Module):
    """The experts' weights, stacked; of each expert, this rank's part of its inner dimension."""

    def __init__(self, parts: Parts, experts: ExpertsConfig) -> None:
        super().__init__()
        hidden, width = parts.config.hidden_size, parts.even(experts.intermediate_size)
        gate_up = {"gate_proj": width, "up_proj": width}
        self.gate_up_proj = parts.expert_linear(experts.num_experts, hidden, gate_up)
        self.down_proj = parts.expert_linear(experts.num_experts, width, {"down_proj": whole(hidden)})
        self._activation = parts.config.hidden_act
        self._activate: Callable[[Tensor], Tensor] = partial(activate_and_mul, parts.config.hidden_act)
        self._width = width.length

    def use_native(self, kernels: NativeKernels) -> None:
        """Compute the gate with the C++ kernel from now on, where it has one for this width."""
        if self._width % LANES == 0:
            self._activate = Activate(kernels, self._activation, has_up=True)

    def forward(self, expert: int, hidden: Tensor) -> Tensor:
        """One expert's output for the tokens that it was given, [n, hidden_size] both ways: what this rank's
        part adds to it.
        """
        gated = self._activate(self.gate_up_proj(expert, hidden))
        projected: Tensor = self.down_proj(expert, gated)
        return projected

    def all_at_once(self, hidden: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Each token's sum over its experts, [T, hidden_size]; weights and ids [T, num_per_token]."""
        # Imported where a GPU is used, and only there: a CPU needs no triton.
        from model_worker.kernels.triton.experts import fused_experts

        gate_up, down = self.gate_up_proj, self.down_proj
        return fused_experts(
            hidden,
            gate_up.weight.data,
            down.weight.data,
            weights,
            ids,
            self._activate,
            gate_up_scale=gate_up.weight_scale,
            down_scale=down.weight_scale,
        )


class SparseMLP(nn.Module):
    """Each token through the experts that the router likes best, weighted by how much."""

    def __init__(self, parts: Parts, experts: ExpertsConfig) -> None:
        super().__init__()
        # Its output is as wide as a kernel wants it; what is behind the experts is nobody's.
        self.router = parts.linear(
            parts.config.hidden_size, padded(experts.num_experts), bias=False, quantized=False
        )
        self._num_experts = experts.num_experts
        self.experts = Experts(parts, experts)
        self._num_per_token = experts.num_per_token
        self._renormalize = experts.renormalize
        self._native: NativeExperts | None = None

    def use_native(self, kernels: NativeKernels, scratch: ExpertScratch) -> None:
        """Compute with the C++ kernels from now on, where each expert is made of them: its own layers
        use them already.
        """
        if scratch.x.shape[1] % LANES:
            return
        try:
            self._native = NativeExperts(
                kernels,
                self.experts,
                scratch,
                num_experts=self._num_experts,
                num_per_token=self._num_per_token,
                renormalizes=self._renormalize,
            )
        except NotRecordable as error:
            logger.debug("the experts are not one kernel, because they use %s", error)

    @property
    def is_native(self) -> bool:
        """The C++ kernels compute it."""
        return self._native is not None

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [T, hidden_size] -> [T, hidden_size].

        Tokens are sorted by expert, so that each expert is one matrix product. How many each has is read on
        the host, but on a GPU, which would have to be waited for.
        """
        if self._native is not None:
            return self._native(hidden, self.router(hidden))
        scores = self.router(hidden)[:, : self._num_experts]
        weights, ids = choose_experts(scores, self._num_per_token, renormalizes=self._renormalize)
        if hidden.is_cuda:
            return self.experts.all_at_once(hidden, weights, ids)
        by_expert = ids.flatten().argsort(stable=True)
        counts = ids.flatten().bincount(minlength=self._num_experts).tolist()
        tokens = by_expert // self._num_per_token
        outputs = hidden.new_empty(len(tokens), hidden.shape[1])
        start = 0
        for expert, count in enumerate(counts):
            if count:
                own = slice(start, start + count)
                outputs[own] = self.experts(expert, hidden[tokens[own]])
                start += count
        outputs *= weights.flatten()[by_expert].unsqueeze(1)
        # Each token's outputs side by side again: summed in the order of its experts, whatever the batch is.
        places = by_expert.argsort()
        return outputs[places].view(-1, self._num_per_token, hidden.shape[1]).sum(1)


class ParallelSparseMLP(SparseMLP):
    """A SparseMLP of which each rank has a part of every expert: summed once, over all experts."""

    def __init__(self, parts: Parts, experts: ExpertsConfig) -> None:
        super().__init__(parts, experts)
        self._group = parts.group

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [T, hidden_size] -> [T, hidden_size], the same on all ranks."""
        return self._group.all_reduce(super().forward(hidden))
