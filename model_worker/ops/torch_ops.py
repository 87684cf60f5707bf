"""TorchOps: operations made of functions of tensors, torch's own or others with the same results. With
torch's functions they run on any device, and define what the other Ops compute.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from model_worker.attention.base import AttentionBackend
from model_worker.attention.torch_native import TorchNativeAttention
from model_worker.kernels.activation import ACTIVATIONS
from model_worker.kernels.embedding import embed_int8
from model_worker.kernels.experts import mix_experts
from model_worker.kernels.fp8_linear import Fp8Linear
from model_worker.kernels.fp8_rows import FP8
from model_worker.kernels.int8_linear import int8_linear
from model_worker.kernels.layer_norm import layer_norm
from model_worker.ops.adapters import LayerAdapters, NativeRows, RowAdapters, TorchAdapters, TorchRows
from model_worker.ops.base import (
    ExpertWeights,
    Frequencies,
    Head,
    KernelTable,
    LinearWeight,
    Map,
    MixtureOfExperts,
    Norm,
    Ops,
    Product,
    TakeRows,
)
from model_worker.ops.functions import BY_TORCH, Functions
from runtime.checkpoint.model_config import Activation


class BoundProduct:
    """Product made of a function of rows and constants."""

    batch_invariant = False
    packs_weight = False

    def __init__(self, function: Callable[..., Tensor], *constants: Any) -> None:
        self._function = function
        self._constants = constants

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the product; see Product."""
        return self._function(x, *self._constants)


class ConvertedHead:
    """Head that computes logits in the weight's dtype and then converts them."""

    batch_invariant = False
    packs_weight = False

    def __init__(self, weight: Tensor, multiply: Callable[[Tensor, Tensor, None], Tensor]) -> None:
        self._weight = weight
        self._multiply = multiply

    def __call__(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return logits for hidden states; see Head."""
        logits = self._multiply(hidden, self._weight, None)
        # The conversion copies anyway, so an output buffer costs nothing.
        return logits.float() if out is None else out.copy_(logits)


class FunctionNorm:
    """Norm by functions, including one that adds and norms at once."""

    def __init__(self, functions: Functions, weight: Tensor, eps: float) -> None:
        self._norm = functions.rms_norm
        self._add_and_norm = functions.fused_add_rms_norm
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of x; see Norm."""
        return self._norm(x, self.weight, self.eps)

    def add_and_norm(self, residual: Tensor, update: Tensor, update_norm: Norm | None = None) -> Tensor:
        """Add update, normed by update_norm if given, to residual in place, and return the norm of the sum;
        all [T, size].
        """
        if isinstance(update_norm, FunctionNorm) and update_norm.eps == self.eps:
            return self._add_and_norm(residual, update, self.weight, self.eps, update_norm.weight)
        update = update if update_norm is None else update_norm(update)
        return self._add_and_norm(residual, update, self.weight, self.eps)


class StepwiseNorm:
    """Norm by a function that cannot add."""

    def __init__(self, norm: Map) -> None:
        self._norm = norm

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of x; see Norm."""
        return self._norm(x)

    def add_and_norm(self, residual: Tensor, update: Tensor, update_norm: Norm | None = None) -> Tensor:
        """Add update, normed by update_norm if given, to residual in place, and return the norm of the sum;
        all [T, size].
        """
        return self._norm(residual.add_(update if update_norm is None else update_norm(update)))


class StepwiseExperts:
    """Experts computed one after the other, by products and gates of any Ops. run: computes one expert, [n,
    hidden_size] -> [n, hidden_size].
    """

    batch_invariant = False

    def __init__(self, ops: Ops, weights: ExpertWeights) -> None:
        def products(weight: Tensor, scale: Tensor | None) -> list[Product]:
            return [
                ops.linear(
                    LinearWeight(weight.data[e], weights.dtype, None if scale is None else scale.data[e])
                )
                for e in range(weights.num_experts)
            ]

        gate_up = products(weights.gate_up, weights.gate_up_scale)
        self._gated = [ops.gated(each, weights.activation, weights.width) for each in gate_up]
        self._down = products(weights.down, weights.down_scale)
        self.packs_weight = any(each.packs_weight for each in (*gate_up, *self._down))
        self._weights = weights

    def run(self, expert: int, x: Tensor) -> Tensor:
        return self._down[expert](self._gated[expert](x))

    def __call__(self, hidden: Tensor, scores: Tensor) -> Tensor:
        """Mix the experts; see MixtureOfExperts."""
        weights = self._weights
        return mix_experts(
            hidden,
            scores,
            self.run,
            num_experts=weights.num_experts,
            num_per_token=weights.num_per_token,
            renormalizes=weights.renormalizes,
        )


class TorchOps(Ops):
    """Ops by torch's own functions, for any device. They define what the others compute."""

    name = "torch"
    sampling_kernels = None

    def __init__(self, attention: AttentionBackend | None = None, functions: Functions = BY_TORCH) -> None:
        """attention: None: torch's backend."""
        self.attention = TorchNativeAttention() if attention is None else attention
        self.table = KernelTable()
        self.combine = functions.combine
        self.lay_out_decodes = functions.lay_out_decodes
        self._functions = functions
        self._fp8 = Fp8Linear(functions.quantize_rows_fp8, functions.scale_product)
        self.table.note("attention", type(self.attention).__name__)

    def embedding(self, weight: LinearWeight, *, first: int | None = None, multiplier: float = 1.0) -> Map:
        """Make the lookup of ids [T] int64 in the rows of the weight (not float8), in its dtype, times
        multiplier, rounded; see Ops.
        """
        assert not weight.packed
        self._note("embedding")
        embed = self._functions.embed
        if (scale := weight.row_scale) is not None:
            embed = partial(embed_int8, row_scale=scale, dtype=weight.dtype)
        return partial(embed, weight=weight.rows, first=first, scale=multiplier)

    def take_rows(self, like: Tensor) -> TakeRows:
        """Make the function that takes rows of any table with the width and dtype of `like`."""
        self._note("take_rows")
        return take_rows

    def rms_norm(self, weight: Tensor, eps: float, dtype: torch.dtype) -> Norm:
        """Make an RMS norm over the last dimension."""
        self._note("rms_norm")
        return FunctionNorm(self._functions, weight, eps)

    def layer_norm(self, weight: Tensor, bias: Tensor | None, eps: float) -> Norm:
        """Make a layer norm over the last dimension."""
        self.table.note("layer_norm", BY_TORCH.name)
        return StepwiseNorm(partial(layer_norm, weight=weight, bias=bias, eps=eps))

    def rotary_angles(self, frequencies: Tensor | Frequencies, amplitude: Tensor | None) -> Map:
        """Make the function from positions [T] int64 to cosines and sines [T, D] float32;
        see `kernels.rope`.
        """
        self._note("rotary_angles")
        cos_sin = self._functions.rope_cos_sin
        if isinstance(frequencies, Tensor):
            return lambda positions: cos_sin(positions, frequencies, amplitude)
        return lambda positions: cos_sin(positions, frequencies(positions), amplitude)

    def packs(self, weight: Tensor) -> bool:
        """Return True if a product with this unquantised weight would pack it."""
        return False

    def linear(self, weight: LinearWeight, bias: Tensor | None = None) -> Product:
        """Make the product x @ weight.T + bias for x of the weight's dtype, rounded to it."""
        rows = weight.rows
        if weight.scale is None:
            self.table.note("linear", BY_TORCH.name)
            return BoundProduct(self._functions.linear, rows, bias)
        if rows.dtype is FP8:
            self._note("linear, float8")
            return BoundProduct(self._fp8, rows, weight.scale, bias)
        self.table.note("linear, int8", BY_TORCH.name)
        return BoundProduct(int8_linear, rows, weight.row_scale, bias, self._functions.int8_sums)

    def head(self, weight: LinearWeight) -> Head:
        """Make the head: logits of hidden states of the weight's dtype. See Ops."""
        self.table.note("head", BY_TORCH.name)
        if (scale := weight.row_scale) is not None:

            def multiply(hidden: Tensor, weight: Tensor, bias: None) -> Tensor:
                return int8_linear(hidden.float(), weight, scale, bias, self._functions.int8_sums)

            return ConvertedHead(weight.rows, multiply)
        return ConvertedHead(weight.rows, self._functions.linear)

    def activation(self, name: Activation, width: int) -> Map:
        """Make the function [T, width] -> activation(x)."""
        self.table.note("activation", BY_TORCH.name)
        return ACTIVATIONS[name]

    def gated(self, product: Product, name: Activation, width: int) -> Map:
        """Make a product followed by its gate; see Ops."""
        self._note("gate")
        gate = self._functions.activate_and_mul
        return lambda x: gate(name, product(x))

    def experts(self, weights: ExpertWeights) -> MixtureOfExperts:
        """Make the mixture of a layer's experts."""
        self._note("experts")
        return StepwiseExperts(self, weights)

    def row_adapters(self, max_rows: int, num_slots: int, device: torch.device | str = "cpu") -> RowAdapters:
        """Make the table of each row's adapter, for a model on that device with num_slots adapter slots."""
        return TorchRows(max_rows, num_slots)

    def adapters(
        self,
        rows: RowAdapters,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        max_rank: int,
        max_parts: int,
    ) -> LayerAdapters:
        """Make the addition of these rows' adapters to a product [T, in_features] -> [T, out_features] of
        dtype; see Ops.
        """
        self.table.note("adapters", BY_TORCH.name)
        assert isinstance(rows, TorchRows | NativeRows)
        return TorchAdapters(rows)

    def _note(self, operation: str) -> None:
        self.table.note(operation, self._functions.name)


def take_rows(table: Tensor, index: Tensor) -> Tensor:
    """Return the rows of a table at these indices."""
    return table.index_select(0, index)
