"""Token embedding and language-model head, which may share one weight."""

from __future__ import annotations

import torch
from torch import Tensor

from model_worker.distributed.cut import Cut
from model_worker.distributed.group import RankGroup
from model_worker.layers.bound import BoundLayer
from model_worker.layers.weight import Weight
from model_worker.ops.base import Head, LinearWeight, Map, Ops
from model_worker.quant.base import QuantMethod
from model_worker.quant.unquantized import UNQUANTIZED

COMPRESSED_ROWS = 4096
"""Rows of a head that are compressed at a time, since this takes additional memory in float32."""


def _as_stored(weight: Weight, dtype: torch.dtype) -> LinearWeight:
    scale = None if weight.row_scale is None else weight.row_scale.unsqueeze(-1)
    return LinearWeight(weight, dtype, scale, weight.packed)


class TokenEmbedding(BoundLayer):
    """Maps token ids to the inputs of the first layer: the weight's rows, times `multiplier`."""

    _embed: Map

    def __init__(
        self,
        vocab_size: int | Cut,
        hidden_size: int,
        *,
        multiplier: float = 1.0,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self._multiplier = torch.tensor(multiplier, dtype=dtype).item()  # rounded, as the reference has it
        self._dtype = dtype
        self.weight = Weight(vocab_size, hidden_size, dtype=dtype, device=device)
        self._first: int | None = None
        """Id of row 0; None: every id has a row."""

    def bind(self, ops: Ops) -> None:
        """Compute through `ops` from now on, as BoundLayer.bind. A head that shares the weight must be bound
        before.
        """
        self._embed = ops.embedding(
            _as_stored(self.weight, self._dtype), first=self._first, multiplier=self._multiplier
        )

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return [T, hidden_size] for input_ids [T] int64."""
        return self._embed(input_ids)


class VocabParallelEmbedding(TokenEmbedding):
    """TokenEmbedding whose rows are divided among the ranks by id; other ranks contribute zeros."""

    def __init__(
        self,
        vocabulary: Cut,
        hidden_size: int,
        *,
        group: RankGroup,
        multiplier: float = 1.0,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__(vocabulary, hidden_size, multiplier=multiplier, dtype=dtype, device=device)
        self._group = group
        self._first = vocabulary.start

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return [T, hidden_size] for input_ids [T] int64."""
        return self._group.all_reduce(super().forward(input_ids))


class LMHead(BoundLayer):
    """Maps hidden states to logits. With tied embeddings, `weight` is that of the embedding."""

    head: Head

    def __init__(self, weight: Weight, quant: QuantMethod = UNQUANTIZED) -> None:
        super().__init__()
        self.weight = weight
        self._quant = quant
        self.dtype = weight.dtype
        """Dtype of the hidden states. The stored weight may have another one."""

    def compress(self) -> None:
        """Convert the weight to its stored form, once, when it is loaded; a tied embedding's rows, too."""
        parts = self.weight.data.split(COMPRESSED_ROWS)
        if (first := self._quant.compress(parts[0])) is None:
            return
        compressed = torch.empty_like(self.weight.data, dtype=first[0].dtype)
        scale = torch.empty(len(compressed), dtype=torch.float32, device=compressed.device)
        for own, own_scale, part in zip(
            compressed.split(COMPRESSED_ROWS), scale.split(COMPRESSED_ROWS), parts, strict=True
        ):
            if (made := self._quant.compress(part)) is not None:
                own.copy_(made[0])
                own_scale.copy_(made[1].squeeze(-1))
        self.weight.data, self.weight.row_scale = compressed, scale

    def bind(self, ops: Ops) -> None:
        """Compute through `ops` from now on; see BoundLayer.bind."""
        self.head = ops.head(_as_stored(self.weight, self.dtype))
        self.weight.packed = self.head.packs_weight

    def forward(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return logits [S, vocab_size] float32 for hidden [S, hidden_size], in `out` if it is given."""
        return self.head(hidden, out)


class ParallelLMHead(LMHead):
    """LMHead whose rows are divided among the ranks by id."""

    def __init__(self, weight: Weight, group: RankGroup, quant: QuantMethod = UNQUANTIZED) -> None:
        super().__init__(weight, quant)
        self._group = group
        self._vocab_size = weight.cuts[0].total

    def forward(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return logits [S, vocab_size] float32 for hidden [S, hidden_size] on rank 0, which alone uses them,
        in `out` if given; [0, vocab_size] on other ranks.
        """
        # What lies behind the vocabulary is room that its last ranks do not fill.
        logits = self._group.gather(super().forward(hidden), self._vocab_size, out)
        if logits is None:
            return torch.empty(0, self._vocab_size, dtype=torch.float32, device=hidden.device)
        return logits
