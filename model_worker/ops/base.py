"""Ops: makes the operations of a model's layers. Knows weights and shapes; knows no layer and no family."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from model_worker.attention.base import AttentionBackend
from model_worker.kernels.combine import CombineLike
from model_worker.kernels.decode_inputs import LayOutDecodesLike
from model_worker.kernels.native.library import NativeKernels
from model_worker.ops.adapters import LayerAdapters, RowAdapters
from runtime.checkpoint.model_config import Activation

logger = logging.getLogger(__name__)

Map = Callable[[Tensor], Tensor]
"""Function of rows to rows, [T, N] -> [T, M]."""
Frequencies = Callable[[Tensor], Tensor]
"""Function of positions [T] to the frequencies [T, D / 2] of each."""


class Product(Protocol):
    """A linear layer over one weight: x [T, K] -> [T, N]."""

    @property
    def batch_invariant(self) -> bool:
        """True where a row's result is the same bits beside any other rows."""

    @property
    def packs_weight(self) -> bool:
        """True where the weight is rearranged in place, as nothing but this Ops reads it."""

    def __call__(self, x: Tensor) -> Tensor: ...


class Head(Protocol):
    """The language-model head over one weight."""

    @property
    def batch_invariant(self) -> bool:
        """True where a row's result is the same bits beside any other rows."""

    @property
    def packs_weight(self) -> bool:
        """True where the weight is rearranged in place, as nothing but this Ops reads it."""

    def __call__(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden [S, hidden_size] -> logits [S, vocab_size] float32, in `out` if it is given."""


class Norm(Protocol):
    """A norm over the last dimension, with a learned scale."""

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of x [T, size] or [T, heads, size]."""

    def add_and_norm(self, residual: Tensor, update: Tensor, update_norm: Norm | None = None) -> Tensor:
        """Add update, normed by update_norm if there is one, to residual in place and return the norm of the
        sum; all [T, size].
        """


class MixtureOfExperts(Protocol):
    """Experts of one layer, and the choice among them."""

    @property
    def batch_invariant(self) -> bool:
        """True where a row's result is the same bits beside any other rows."""

    @property
    def packs_weight(self) -> bool:
        """See Product; of any of the weights."""

    def __call__(self, hidden: Tensor, scores: Tensor) -> Tensor:
        """hidden [T, hidden_size], scores [T, num_experts or more] of the router -> [T, hidden_size]."""


class TakeRows(Protocol):
    def __call__(self, table: Tensor, index: Tensor) -> Tensor:
        """table [N, K], index [T] int64 -> [T, K]."""


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """Weight of a linear layer, a head or an embedding, as it is stored."""

    rows: Tensor  # [N, K] of dtype, or int8 or float8_e4m3fn
    dtype: torch.dtype  # of what is multiplied with it, or made of its rows
    scale: Tensor | None = None  # [N, 1] float32, of 8 bits
    packed: bool = False  # another product or head of the same Ops packs it

    @property
    def row_scale(self) -> Tensor | None:
        """The scale as [N]."""
        return None if self.scale is None else self.scale.squeeze(-1)


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Weights of a layer's experts, and how many a token goes through."""

    gate_up: Tensor  # [E, 2 * width, hidden_size]
    down: Tensor  # [E, hidden_size, width]
    gate_up_scale: Tensor | None  # [E, 2 * width, 1] float32, of weights of 8 bits
    down_scale: Tensor | None  # [E, hidden_size, 1]
    activation: Activation
    dtype: torch.dtype  # of hidden states
    num_per_token: int
    renormalizes: bool

    @property
    def num_experts(self) -> int:
        return len(self.down)

    @property
    def width(self) -> int:
        """Inner dimension of one expert's feed-forward."""
        return self.down.shape[2]


@dataclass(slots=True)
class KernelTable:
    """Table of which implementation each operation has, how often it was made, and the reason where there is
    a faster one.
    """

    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Number of times by (operation, implementation, reason); the reason is empty for the fastest."""
    slow: list[str] = field(default_factory=list)
    """Lines on settings that are slower than others on this machine."""
    cost_of_torch: str = ""
    """A line on how much longer torch takes; empty where that was not measured."""

    def note(self, operation: str, implementation: str, reason: str = "") -> None:
        self.counts[operation, implementation, reason] += 1

    def lines(self) -> Iterator[str]:
        """Lines of the table, by the operations' names."""
        for (operation, implementation, reason), count in sorted(self.counts.items()):
            yield f"{operation:<16} {implementation:<20} {count:>5}  {reason}".rstrip()

    def log(self) -> None:
        """Say what is slow here, what has no kernel, and at debug what has which."""
        for line in self.slow:
            logger.warning("%s", line)
        missing = {
            f"{operation} by {implementation} ({reason})"
            for operation, implementation, reason in self.counts
            if reason
        }
        if missing:
            cost = f"; {self.cost_of_torch}" if self.cost_of_torch else ""
            logger.info("computed more slowly than it could be: %s%s", "; ".join(sorted(missing)), cost)
        logger.debug("kernels:\n%s", "\n".join(self.lines()))


class Ops(Protocol):
    """Maker of operations over weights that are loaded. One object serves a whole model, and its runner. What
    it returns is bound to one weight, is called by the thread that runs the forward, and takes no decision
    but by the shapes of its arguments.
    """

    name: str
    """Name of the Ops in ops.selection; what records a step goes by it."""
    attention: AttentionBackend
    combine: CombineLike
    lay_out_decodes: LayOutDecodesLike
    table: KernelTable
    sampling_kernels: NativeKernels | None
    """Library of C++ kernels for the sampler; None: it has others."""

    def embedding(self, weight: LinearWeight, *, first: int | None = None, multiplier: float = 1.0) -> Map:
        """Make the look-up of ids [T] int64 in rows of the weight, not of float8, in its dtype, times
        multiplier, rounded. first: the id of row 0; one that the weight has no row of becomes zeros.
        """
        ...

    def take_rows(self, like: Tensor) -> TakeRows:
        """Make the function that takes rows of any table of the width and dtype of `like`."""
        ...

    def rms_norm(self, weight: Tensor, eps: float, dtype: torch.dtype) -> Norm:
        """See `kernels.rms_norm`; dtype: of what is normed."""
        ...

    def layer_norm(self, weight: Tensor, bias: Tensor | None, eps: float) -> Norm:
        """See `kernels.layer_norm`; weight and bias [size] or [heads, size]."""
        ...

    def rotary_angles(self, frequencies: Tensor | Frequencies, amplitude: Tensor | None) -> Map:
        """Make the function of positions [T] int64 to cosines and sines [T, D] float32, as `kernels.rope` has
        them.
        """
        ...

    def packs(self, weight: Tensor) -> bool:
        """Tell whether a product over this weight, not quantised, would pack it."""
        ...

    def linear(self, weight: LinearWeight, bias: Tensor | None = None) -> Product:
        """Make the product x @ weight.T + bias for x of the weight's dtype, rounded to it."""
        ...

    def head(self, weight: LinearWeight) -> Head:
        """Make the head: logits of hidden states of the weight's dtype. The weight is not of float8."""
        ...

    def activation(self, name: Activation, width: int) -> Map:
        """Make the function [T, width] -> activation(x)."""
        ...

    def gated(self, product: Product, name: Activation, width: int) -> Map:
        """Make the product, [T, K] -> [T, 2 * width] of a gate, then what it multiplies; and the gate."""
        ...

    def experts(self, weights: ExpertWeights) -> MixtureOfExperts: ...

    def row_adapters(self, max_rows: int, num_slots: int, device: torch.device | str = "cpu") -> RowAdapters:
        """Make the table of which adapter each row is computed with, of a model on that device that may have
        so many.
        """
        ...

    def adapters(
        self,
        rows: RowAdapters,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        max_rank: int,
        max_parts: int,
    ) -> LayerAdapters:
        """Make what adapters of these rows add to a product [T, in_features] -> [T, out_features]
        of dtype. max_parts: of an adapter here, each of max_rank at most.
        """
        ...
