"""Puts the C++ linear kernel where transformers has nn.Linear, and its table of rows where that is tied."""

from __future__ import annotations

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


def use_native(decoder: nn.Module, head: nn.Module, kernels: NativeKernels) -> None:
    """Replace the linear layers of both, and pack their weights in place.

    Only modules of exactly torch's classes: what a subclass does with its weight is not known. A weight that
    such a module, or any other, shares with a linear layer stays as it is, and so does that layer.
    """
    users: dict[int, list[tuple[nn.Module, str, nn.Module]]] = {}
    for root in (decoder, head):
        for parent in root.modules():
            for name, module in parent.named_children():
                weight = getattr(module, "weight", None)
                if isinstance(weight, Tensor):
                    users.setdefault(weight.data_ptr(), []).append((parent, name, module))
    for shared in users.values():
        modules = [module for _, _, module in shared]
        weight = modules[0].weight
        replaceable = all(_is_plain(module) for module in modules)
        if (
            any(type(module) is nn.Linear for module in modules)
            and replaceable
            and _can_pack(kernels, weight)
        ):
            pack(kernels, weight)
            for parent, name, module in shared:
                kind = _Linear if type(module) is nn.Linear else _Embedding
                setattr(parent, name, kind(kernels, module))


def _is_plain(module: nn.Module) -> bool:
    if type(module) is nn.Embedding:
        return module.max_norm is None
    return type(module) is nn.Linear


def _can_pack(kernels: NativeKernels, weight: Tensor) -> bool:
    return weight.is_contiguous() and can_pack(kernels, weight)
