"""Token embedding and the language-model head, which may share one weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model_worker.kernels.native.library import NativeKernels
from model_worker.kernels.native.operators import PackedLinear, can_pack, packed_rows
from model_worker.layers.linear import pack_once
from model_worker.layers.weight import Weight


class TokenEmbedding(nn.Module):
    """Token ids to the vectors the first layer reads: the weight's rows, times `multiplier`."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        multiplier: float = 1.0,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        # As a tensor it is rounded to the dtype, as the reference has it.
        self._multiplier = None if multiplier == 1.0 else torch.tensor(multiplier, dtype=dtype, device=device)
        self.weight = Weight(vocab_size, hidden_size, dtype=dtype, device=device)
        self._kernels: NativeKernels | None = None

    def use_native(self, kernels: NativeKernels) -> None:
        """Read the weight as a head that shares it may have packed it."""
        self._kernels = kernels

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids [T] int64 -> [T, hidden_size]."""
        if self.weight.packed:
            assert self._kernels is not None
            rows = packed_rows(self._kernels, self.weight, input_ids)
        else:
            rows = F.embedding(input_ids, self.weight)
        return rows if self._multiplier is None else rows * self._multiplier


class LMHead(nn.Module):
    """Hidden states to logits. With tied embeddings, `weight` is the embedding's own."""

    def __init__(self, weight: Weight) -> None:
        super().__init__()
        self.weight = weight
        self._packed: PackedLinear | None = None

    def use_native(self, kernels: NativeKernels) -> None:
        """Compute with the C++ kernel from now on, where it has one for this weight; weights are loaded."""
        if can_pack(kernels, self.weight):
            pack_once(kernels, self.weight)
            self._packed = PackedLinear(kernels, self.weight, None, out_dtype=torch.float32)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [S, hidden_size] -> logits [S, vocab_size] float32."""
        if self._packed is not None:
            return self._packed(hidden)
        return F.linear(hidden, self.weight).float()
