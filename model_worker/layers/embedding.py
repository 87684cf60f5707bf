"""Token embedding and the language-model head, which may share one weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model_worker.distributed.cut import Cut
from model_worker.distributed.group import RankGroup
from model_worker.kernels.combine import CombineLike, combine
from model_worker.kernels.embedding import embed
from model_worker.kernels.linear import linear
from model_worker.kernels.native.library import NativeKernels
from model_worker.kernels.native.operators import Combine, PackedLinear, TakeRows, can_pack, can_take, pack
from model_worker.layers.weight import Weight


class TokenEmbedding(nn.Module):
    """Token ids to the vectors the first layer reads: the weight's rows, times `multiplier`."""

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
        self.weight = Weight(vocab_size, hidden_size, dtype=dtype, device=device)
        self._take: TakeRows | None = None
        self._combine: CombineLike = combine

    def use_native(self, kernels: NativeKernels) -> None:
        """Read the weight, which a head that shares it may have packed, with the C++ kernel from now on."""
        if can_take(self.weight):
            self._take = TakeRows(kernels)
        self._combine = Combine(kernels)

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids [T] int64 -> [T, hidden_size]."""
        if self._take is None:
            return embed(input_ids, self.weight, scale=self._multiplier)
        rows = self._take(self.weight, input_ids, packed=self.weight.packed)
        return rows if self._multiplier == 1.0 else self._combine(rows, scale=self._multiplier, out=rows)


class VocabParallelEmbedding(TokenEmbedding):
    """A TokenEmbedding of which each rank has some tokens' rows: the others add zero."""

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
        self._last = vocabulary.room - 1

    def forward(self, input_ids: Tensor) -> Tensor:
        """See TokenEmbedding.forward."""
        return self._group.all_reduce(self._own_rows(input_ids))

    def _own_rows(self, ids: Tensor) -> Tensor:
        if self._take is None:
            return embed(ids, self.weight, first=self._first, scale=self._multiplier)
        local = ids - self._first
        nearest = local.clamp(0, self._last)
        return super().forward(nearest).mul_((nearest == local).unsqueeze(1))


class LMHead(nn.Module):
    """Hidden states to logits. With tied embeddings, `weight` is the embedding's own."""

    def __init__(self, weight: Weight) -> None:
        super().__init__()
        self.weight = weight
        self._packed: PackedLinear | None = None

    def use_native(self, kernels: NativeKernels) -> None:
        """Compute with the C++ kernel from now on, where it has one for this weight; weights are loaded."""
        if can_pack(kernels, self.weight):
            pack(kernels, self.weight)
            self.weight.packed = True
            self._packed = PackedLinear(kernels, self.weight, None, out_dtype=torch.float32)

    @property
    def is_packed(self) -> bool:
        """The C++ kernel computes it."""
        return self._packed is not None

    def forward(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden [S, hidden_size] -> logits [S, vocab_size] float32, in `out` if it is given."""
        if self._packed is not None:
            logits = self._packed(hidden)
            return logits if out is None else out.copy_(logits)
        if hidden.is_cuda and hidden.dtype is not torch.float32:
            # The product's own sums, as the C++ kernel gives them; torch has no such operation on a CPU.
            return torch.mm(hidden, self.weight.t(), out_dtype=torch.float32, out=out)
        logits = linear(hidden, self.weight)
        # The copy is the conversion: a buffer to write to costs nothing more.
        return logits.float() if out is None else out.copy_(logits)


class ParallelLMHead(LMHead):
    """An LMHead of which each rank has some tokens' rows."""

    def __init__(self, weight: Weight, group: RankGroup) -> None:
        super().__init__(weight)
        self._group = group
        self._vocab_size = weight.cuts[0].total

    def forward(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden [S, hidden_size] -> logits [S, vocab_size] float32, in `out` if given, on rank 0, which
        alone looks at them; on the others [0, vocab_size].
        """
        # What lies behind the vocabulary is room that its last ranks do not fill.
        logits = self._group.gather(super().forward(hidden), self._vocab_size, out)
        if logits is None:
            return torch.empty(0, self._vocab_size, dtype=torch.float32, device=hidden.device)
        return logits
