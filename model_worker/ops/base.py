"""Ops: factory for the operations of a model's layers. Knows weights and shapes; knows no layer and no
family.
"""

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
    """A linear layer with one weight: x [T, K] -> [T, N]."""

    @property
    def batch_invariant(self) -> bool:
        """True if the result of a row has the same bits in any batch."""

    @property
    def packs_weight(self) -> bool:
        """True if the weight is rearranged in place, so that only this Ops can read it."""

    def __call__(self, x: Tensor) -> Tensor: ...


class Head(Protocol):
    """Language-model head with one weight."""

    @property
    def batch_invariant(self) -> bool:
        """True if the result of a row has the same bits in any batch."""

    @property
    def packs_weight(self) -> bool:
        """True if the weight is rearranged in place, so that only this Ops can read it."""

    def __call__(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return logits [S, vocab_size] float32 for hidden [S, hidden_size], in `out` if it is given."""


class Norm(Protocol):
    """Norm over the last dimension, with a learned scale."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of x [T, size] or [T, heads, size]."""

    def add_and_norm(self, residual: Tensor, update: Tensor, update_norm: Norm | None = None) -> Tensor:
        """Add update, normed by update_norm if given, to residual in place, and return the norm of the sum;
        all [T, size].
        """


class MixtureOfExperts(Protocol):
    """Experts of one layer, and the choice among them."""

    @property
    def batch_invariant(self) -> bool:
        """True if the result of a row has the same bits in any batch."""

    @property
    def packs_weight(self) -> bool:
        """True if any of the weights is rearranged in place, so that only this Ops can read it."""

    def __call__(self, hidden: Tensor, scores: Tensor) -> Tensor:
        """Return [T, hidden_size] for hidden [T, hidden_size] and the router's scores [T, num_experts or
        more].
        """


class TakeRows(Protocol):
    def __call__(self, table: Tensor, index: Tensor) -> Tensor:
        """Return rows [T, K] of table [N, K] for index [T] int64."""


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """Weight of a linear layer, a head or an embedding, in its stored form."""

    rows: Tensor  # [N, K] of dtype, or int8 or float8_e4m3fn
    dtype: torch.dtype  # dtype of the inputs of a product, or of the embeddings
    scale: Tensor | None = None  # [N, 1] float32, of 8 bits
    packed: bool = False  # another product or head of the same Ops packs it

    @property
    def row_scale(self) -> Tensor | None:
        """Scales of the rows as [N]; None if the weight has none."""
        return None if self.scale is None else self.scale.squeeze(-1)


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Weights of a layer's experts, and the number of experts for each token."""

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
    """Implementation of each operation, how often it was made, and the reason why no faster one is used."""

    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Counts by (operation, implementation, reason). The reason is empty for the fastest implementation."""
    slow: list[str] = field(default_factory=list)
    """Log lines about settings that are slower than others on this machine."""
    cost_of_torch: str = ""
    """Log line about how much longer torch takes; empty if not measured."""

    def note(self, operation: str, implementation: str, reason: str = "") -> None:
        self.counts[operation, implementation, reason] += 1

    def lines(self) -> Iterator[str]:
        """Yield the lines of the table, by operation name."""
        for (operation, implementation, reason), count in sorted(self.counts.items()):
            yield f"{operation:<16} {implementation:<20} {count:>5}  {reason}".rstrip()

    def log(self) -> None:
        """Log the slow operations, those without a kernel, and at debug level the kernel of each
        operation.
        """
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
    """Factory of operations over loaded weights. One object serves a whole model and its runner. An operation
    that it returns is bound to one weight, is called by the forward's thread, and depends only on the shapes
    of its arguments.
    """

    name: str
    """Name of the Ops in ops.selection, by which the recorder of steps is chosen."""
    attention: AttentionBackend
    combine: CombineLike
    lay_out_decodes: LayOutDecodesLike
    table: KernelTable
    sampling_kernels: NativeKernels | None
    """Library of C++ kernels for the sampler; None if the sampler uses others."""

    def embedding(self, weight: LinearWeight, *, first: int | None = None, multiplier: float = 1.0) -> Map:
        """Make the lookup of ids [T] int64 in the rows of the weight (not float8), in its dtype, times
        multiplier, rounded. first: id of row 0; ids without a row give zeros.
        """
        ...

    def take_rows(self, like: Tensor) -> TakeRows:
        """Make the function that takes rows of any table with the width and dtype of `like`."""
        ...

    def rms_norm(self, weight: Tensor, eps: float, dtype: torch.dtype) -> Norm:
        """Make an RMS norm; see `kernels.rms_norm`. dtype: of the input."""
        ...

    def layer_norm(self, weight: Tensor, bias: Tensor | None, eps: float) -> Norm:
        """Make a layer norm; see `kernels.layer_norm`. weight, bias: [size] or [heads, size]."""
        ...

    def rotary_angles(self, frequencies: Tensor | Frequencies, amplitude: Tensor | None) -> Map:
        """Make the function from positions [T] int64 to cosines and sines [T, D] float32;
        see `kernels.rope`.
        """
        ...

    def packs(self, weight: Tensor) -> bool:
        """Return True if a product with this unquantised weight would pack it."""
        ...

    def linear(self, weight: LinearWeight, bias: Tensor | None = None) -> Product:
        """Make the product x @ weight.T + bias for x of the weight's dtype, rounded to it."""
        ...

    def head(self, weight: LinearWeight) -> Head:
        """Make the head: logits of hidden states of the weight's dtype. The weight must not be float8."""
        ...

    def activation(self, name: Activation, width: int) -> Map:
        """Make the function [T, width] -> activation(x)."""
        ...

    def gated(self, product: Product, name: Activation, width: int) -> Map:
        """Make a product followed by its gate: the product [T, K] -> [T, 2 * width] holds gate and then up;
        the result is activation(gate) * up.
        """
        ...

    def experts(self, weights: ExpertWeights) -> MixtureOfExperts: ...

    def row_adapters(self, max_rows: int, num_slots: int, device: torch.device | str = "cpu") -> RowAdapters:
        """Make the table of each row's adapter, for a model on that device with num_slots adapter slots."""
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
        """Make the addition of these rows' adapters to a product [T, in_features] -> [T, out_features] of
        dtype. max_parts: most parts of an adapter in this layer, each of rank max_rank at most.
        """
        ...
