"""Replaces nn.Linear modules of transformers by products of an Ops, and tied embeddings by its row lookup."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from model_worker.ops.base import LinearWeight, Ops


class _Linear(nn.Module):
    """Linear layer with a packed weight: x @ weight.T + bias."""

    def __init__(self, ops: Ops, linear: nn.Linear, is_packed: bool) -> None:
        super().__init__()
        self.weight = weight = linear.weight
        self.bias = linear.bias
        self._run = ops.linear(LinearWeight(weight, weight.dtype, packed=is_packed), linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out_features] for x [..., in_features]."""
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return self._run(rows).view(*x.shape[:-1], self.weight.shape[0])


class _Embedding(nn.Module):
    """Embedding with a packed weight."""

    def __init__(self, ops: Ops, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = weight = embedding.weight
        self._take = ops.embedding(LinearWeight(weight, weight.dtype, packed=True))

    def forward(self, ids: Tensor) -> Tensor:
        """Return [..., hidden_size] for ids [...] int64."""
        return self._take(ids.flatten()).view(*ids.shape, -1)


class _Use(NamedTuple):
    """A module that has a weight, and its place in its parent."""

    parent: nn.Module
    name: str
    module: nn.Module
    weight: Tensor


def bind(decoder: nn.Module, head: nn.Module, ops: Ops) -> None:
    """Replace, in place, the linear layers of both whose weights `ops` packs.

    Only modules of exactly torch's classes are replaced, because a subclass may do anything with its weight.
    A weight that such a module, or any other, shares with a linear layer stays as it is, and so does that
    layer.
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
        if has_linear and all(_is_plain(use.module) for use in uses) and _can_pack(ops, weight):
            is_packed = False
            for use in sorted(uses, key=lambda use: isinstance(use.module, nn.Embedding)):
                setattr(use.parent, use.name, _replacement(ops, use.module, is_packed))
                is_packed = True


def _replacement(ops: Ops, module: nn.Module, is_packed: bool) -> nn.Module:
    if isinstance(module, nn.Linear):
        return _Linear(ops, module, is_packed)
    assert isinstance(module, nn.Embedding)
    return _Embedding(ops, module)


def _is_plain(module: nn.Module) -> bool:
    if type(module) is nn.Embedding:
        return module.max_norm is None
    return type(module) is nn.Linear


def _can_pack(ops: Ops, weight: Tensor) -> bool:
    return weight.is_contiguous() and ops.packs(weight)
