"""Puts the C++ linear kernel where transformers has nn.Linear, and its table of rows where that is tied."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from model_worker.kernels.native.library import NativeKernels
from model_worker.kernels.native.operators import PackedLinear, TakeRows, can_pack, pack


class _Linear(nn.Module):
    """x @ weight.T + bias over a packed weight."""

    def __init__(self, kernels: NativeKernels, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self._run = PackedLinear(kernels, linear.weight, linear.bias, out_dtype=linear.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features] -> [..., out_features]."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return self._run(rows).view(*x.shape[:-1], self.weight.shape[0])


class _Embedding(nn.Module):
    """Rows of a packed weight."""

    def __init__(self, kernels: NativeKernels, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight
        self._take = TakeRows(kernels)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [...] int64 -> [..., hidden_size]."""
        return self._take(self.weight, ids.flatten(), packed=True).view(*ids.shape, -1)


class _Use(NamedTuple):
    """A module that has a weight, and where it hangs."""

    parent: nn.Module
    name: str
    module: nn.Module
    weight: Tensor


def use_native(decoder: nn.Module, head: nn.Module, kernels: NativeKernels) -> None:
    """Replace the linear layers of both, and pack their weights in place.

    Only modules of exactly torch's classes: what a subclass does with its weight is not known. A weight that
    such a module, or any other, shares with a linear layer stays as it is, and so does that layer.
    """
    users: dict[int, list[_Use]] = {}
    for root in (decoder, head):
        for parent in root.modules():
            for name, module in parent.named_children():
                weight = getattr(module, "weight", None)
                if isinstance(weight, Tensor):
                    users.setdefault(weight.data_ptr(), []).append(_Use(parent, name, module, weight))
    for uses in users.values():
        weight = uses[0].weight
        has_linear = any(type(use.module) is nn.Linear for use in uses)
        if has_linear and all(_is_plain(use.module) for use in uses) and _can_pack(kernels, weight):
            pack(kernels, weight)
            for use in uses:
                setattr(use.parent, use.name, _replacement(kernels, use.module))


def _replacement(kernels: NativeKernels, module: nn.Module) -> nn.Module:
    if isinstance(module, nn.Linear):
        return _Linear(kernels, module)
    assert isinstance(module, nn.Embedding)
    return _Embedding(kernels, module)


def _is_plain(module: nn.Module) -> bool:
    if type(module) is nn.Embedding:
        return module.max_norm is None
    return type(module) is nn.Linear


def _can_pack(kernels: NativeKernels, weight: Tensor) -> bool:
    return weight.is_contiguous() and can_pack(kernels, weight)
