"""Token embedding and the language-model head, which may share one weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model_worker.layers.weight import Weight


class TokenEmbedding(nn.Module):
    """Token ids to the vectors the first layer reads."""

    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.weight = Weight(vocab_size, hidden_size, dtype=dtype, device=device)

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids [T] int64 -> [T, hidden_size]."""
        return F.embedding(input_ids, self.weight)


class LMHead(nn.Module):
    """Hidden states to logits. With tied embeddings, `weight` is the embedding's own."""

    def __init__(self, weight: Weight) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [S, hidden_size] -> logits [S, vocab_size] float32."""
        return F.linear(hidden, self.weight).float()
