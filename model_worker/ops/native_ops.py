"""NativeOps: operations by the C++ kernels on a CPU, and by torch's for shapes that they do not support."""

from __future__ import annotations

import torch
from torch import Tensor

from model_worker.attention.base import AttentionBackend
from model_worker.attention.cpu_native import CpuNativeAttention
from model_worker.kernels.native import operators
from model_worker.kernels.native.build import BuildError
from model_worker.kernels.native.experts import CHUNK, ExpertScratch, NativeExperts
from model_worker.kernels.native.int8_linear import Int8Linear, can_pack_int8
from model_worker.kernels.native.library import NativeKernels
from model_worker.kernels.native.lora import NativeLora, can_adapt
from model_worker.kernels.native.operators import LANES, PackedLinear, can_pack, can_take, pack
from model_worker.kernels.native.program import NotRecordable
from model_worker.ops.adapters import AdaptedProduct, LayerAdapters, NativeRows, RowAdapters
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
from model_worker.ops.functions import BY_TORCH
from model_worker.ops.torch_ops import StepwiseExperts, TorchOps
from runtime.base.errors import ConfigError
from runtime.checkpoint.model_config import Activation

BY_CPP = "C++"


class NativeHead:
    """Head that computes logits by a C++ product."""

    batch_invariant = True
    packs_weight = True

    def __init__(self, multiply: Product) -> None:
        self._multiply = multiply

    def __call__(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return logits for hidden states; see Head."""
        logits = self._multiply(hidden)
        return logits if out is None else out.copy_(logits)


class AdaptedGate:
    """Product and gate in one kernel if no token of the step has an adapter; otherwise product, adapters and
    gate one after the other.
    """

    def __init__(
        self,
        kernels: NativeKernels,
        num_adapted: Tensor,
        joined: PackedLinear | Int8Linear,
        product: AdaptedProduct,
        gate: operators.Activate,
    ) -> None:
        """num_adapted: number of the step's tokens that have an adapter, an int32."""
        self._kernels = kernels
        self._num_adapted = num_adapted
        self._joined = joined
        self._product = product
        self._gate = gate

    def __call__(self, x: Tensor) -> Tensor:
        """Return [T, width] for x [T, K], with the same bits either way."""
        out = self._joined.empty(len(x))
        self._kernels.choose(
            self._num_adapted, lambda: self._joined(x, out), lambda: self._gate(self._product(x), out)
        )
        return out


class NativeOps(Ops):
    """Ops by the C++ kernels, for a CPU. The results of C++ kernels have the same bits for a row in any
    batch.
    """

    name = "native"

    def __init__(self, kernels: NativeKernels, attention: AttentionBackend | None = None) -> None:
        """attention: None: the C++ kernels' backend."""
        self.attention = CpuNativeAttention(kernels) if attention is None else attention
        self.table = KernelTable()
        self.combine = operators.Combine(kernels)
        self.lay_out_decodes = BY_TORCH.lay_out_decodes
        self.sampling_kernels = kernels
        self._kernels = kernels
        self._torch = TorchOps(self.attention)
        self._scratch: ExpertScratch | None = None
        self.table.note("attention", type(self.attention).__name__)

    def embedding(self, weight: LinearWeight, *, first: int | None = None, multiplier: float = 1.0) -> Map:
        """Make the lookup of ids [T] int64 in the rows of the weight (not float8), in its dtype, times
        multiplier, rounded; see Ops.
        """
        if not can_take(weight.rows):
            reason = "rows are not whole words of 32 bits"
            return self._instead("embedding", reason).embedding(weight, first=first, multiplier=multiplier)
        self._note("embedding")
        take, combine = operators.NativeTakeRows(self._kernels), self.combine
        table, packed, row_scale, last = weight.rows, weight.packed, weight.row_scale, len(weight.rows) - 1
        dtype = None if row_scale is None else weight.dtype

        def rows(ids: Tensor) -> Tensor:
            taken = take(table, ids, packed=packed, row_scale=row_scale, dtype=dtype)
            return taken if multiplier == 1.0 else combine(taken, scale=multiplier, out=taken)

        if first is None:
            return rows

        def own_rows(ids: Tensor) -> Tensor:
            local = ids - first
            nearest = local.clamp(0, last)
            return rows(nearest).mul_((nearest == local).unsqueeze(1))

        return own_rows

    def take_rows(self, like: Tensor) -> TakeRows:
        """Make the function that takes rows of any table with the width and dtype of `like`."""
        if not can_take(like):
            return self._instead("take_rows", "rows are not whole words of 32 bits").take_rows(like)
        self._note("take_rows")
        return operators.NativeTakeRows(self._kernels)

    def rms_norm(self, weight: Tensor, eps: float, dtype: torch.dtype) -> Norm:
        """Make an RMS norm over the last dimension."""
        if reason := _reason_of_width(weight.shape[-1]):
            return self._instead("rms_norm", reason).rms_norm(weight, eps, dtype)
        self._note("rms_norm")
        is_wide = weight.dtype is torch.float32
        return operators.NativeNorm(self._kernels, weight, eps, dtype=dtype, is_wide=is_wide)

    def layer_norm(self, weight: Tensor, bias: Tensor | None, eps: float) -> Norm:
        """Make a layer norm over the last dimension."""
        if reason := _reason_of_width(weight.shape[-1]):
            return self._instead("layer_norm", reason).layer_norm(weight, bias, eps)
        self._note("layer_norm")
        return operators.NativeNorm(
            self._kernels, weight, eps, dtype=weight.dtype, bias=bias, centers=True, is_wide=True
        )

    def rotary_angles(self, frequencies: Tensor | Frequencies, amplitude: Tensor | None) -> Map:
        """Make the function from positions [T] int64 to cosines and sines [T, D] float32;
        see `kernels.rope`.
        """
        if not isinstance(frequencies, Tensor):
            reason = "frequencies depend on the position"
            return self._instead("rotary_angles", reason).rotary_angles(frequencies, amplitude)
        self._note("rotary_angles")
        return operators.RotaryAngles(self._kernels, frequencies, amplitude)

    def packs(self, weight: Tensor) -> bool:
        """Return True if a product with this unquantised weight would pack it."""
        return can_pack(weight)

    def linear(self, weight: LinearWeight, bias: Tensor | None = None) -> Product:
        """Make the product x @ weight.T + bias for x of the weight's dtype, rounded to it."""
        product = self._product("linear", weight, bias, weight.dtype)
        if product is not None:
            return product
        operation = "linear" if weight.scale is None else "linear, 8 bits"
        return self._instead(operation, _reason_of_weight(weight.rows)).linear(weight, bias)

    def head(self, weight: LinearWeight) -> Head:
        """Make the head: logits of hidden states of the weight's dtype. See Ops."""
        product = self._product("head", weight, None, torch.float32)
        if product is not None:
            return NativeHead(product)
        return self._instead("head", _reason_of_weight(weight.rows)).head(weight)

    def _product(
        self, operation: str, weight: LinearWeight, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Product | None:
        """Make a product by a C++ kernel, which packs the weight; None if there is no kernel for it."""
        if (scale := weight.row_scale) is not None:
            if weight.rows.dtype is not torch.int8 or not can_pack_int8(weight.rows, weight.dtype):
                return None
            self._note(f"{operation}, int8")
            return Int8Linear(self._kernels, weight.rows, scale, bias, weight.dtype, out_dtype=out_dtype)
        if not self.packs(weight.rows):
            return None
        self._note(operation)
        if not weight.packed:
            pack(self._kernels, weight.rows)
        return PackedLinear(self._kernels, weight.rows.data, bias, out_dtype=out_dtype)

    def activation(self, name: Activation, width: int) -> Map:
        """Make the function [T, width] -> activation(x)."""
        if reason := _reason_of_width(width):
            return self._instead("activation", reason).activation(name, width)
        self._note("activation")
        return operators.Activate(self._kernels, name, has_up=False)

    def gated(self, product: Product, name: Activation, width: int) -> Map:
        """Make a product followed by its gate; see Ops."""
        if reason := _reason_of_width(width):
            return self._instead("gate", reason).gated(product, name, width)
        joined = product.gated(name) if isinstance(product, PackedLinear | Int8Linear) else None
        if joined is not None:
            self._note("gate, in linear")
            return joined
        gate = operators.Activate(self._kernels, name, has_up=True)
        if isinstance(product, AdaptedProduct) and isinstance(product.product, PackedLinear | Int8Linear):
            joined = product.product.gated(name)
            if joined is not None and isinstance(product.adapters, NativeLora):
                self._note("gate, in linear without adapters")
                return AdaptedGate(self._kernels, product.adapters.num_tokens, joined, product, gate)
        self._note("gate")
        return lambda x: gate(product(x))

    def experts(self, weights: ExpertWeights) -> MixtureOfExperts:
        """Make the mixture of a layer's experts."""
        each = StepwiseExperts(self, weights)
        hidden_size = weights.gate_up.shape[2]
        reason = _reason_of_width(hidden_size)
        if not reason:
            try:
                joined = NativeExperts(
                    self._kernels,
                    each.run,
                    self._scratch_for(hidden_size, weights.dtype),
                    num_experts=weights.num_experts,
                    num_per_token=weights.num_per_token,
                    renormalizes=weights.renormalizes,
                    packs_weight=each.packs_weight,
                )
            except NotRecordable as error:
                reason = f"they use {error}"
            else:
                self._note("experts")
                return joined
        self.table.note("experts", BY_TORCH.name, reason)
        return each

    def row_adapters(self, max_rows: int, num_slots: int, device: torch.device | str = "cpu") -> NativeRows:
        """Make the table of each row's adapter, for a model on that device with num_slots adapter slots.
        Compiles the kernels of adapters if necessary.
        """
        try:
            return NativeRows(self._kernels, max_rows, num_slots)
        except BuildError as error:
            raise ConfigError(f"enable_lora: the kernels of adapters cannot be had: {error}") from error

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
        if not can_adapt(in_features, dtype):
            reason = "rows are not whole words of 32 bits"
            return self._instead("adapters", reason).adapters(
                rows, in_features, out_features, dtype, max_rank, max_parts
            )
        self._note("adapters")
        assert isinstance(rows, NativeRows)
        return NativeLora(self._kernels, rows, in_features, out_features, dtype, max_rank, max_parts)

    def _scratch_for(self, hidden_size: int, dtype: torch.dtype) -> ExpertScratch:
        if self._scratch is None:
            self._scratch = ExpertScratch(torch.empty(CHUNK, hidden_size, dtype=dtype))
        return self._scratch

    def _note(self, operation: str) -> None:
        self.table.note(operation, BY_CPP)

    def _instead(self, operation: str, reason: str) -> TorchOps:
        self.table.note(operation, BY_TORCH.name, reason)
        return self._torch


def _reason_of_weight(weight: Tensor) -> str:
    """Return the reason why there is no product for a weight of this shape and dtype."""
    return f"there is no kernel for {list(weight.shape)} in {str(weight.dtype).removeprefix('torch.')}"


def _reason_of_width(width: int) -> str:
    """Return the reason why there is no kernel for rows of that width; empty if there is one."""
    return f"{width} is no multiple of {LANES}" if width % LANES else ""
