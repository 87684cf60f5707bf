"""Parts: factory for the modules of the decoder, by config and spec. It decides how a model is divided among
ranks; a single rank gets layers that know of no other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model_worker.distributed.cut import Cut, by_heads, by_vocabulary, even
from model_worker.distributed.group import SOLO, RankGroup
from model_worker.layers.embedding import LMHead, ParallelLMHead, TokenEmbedding, VocabParallelEmbedding
from model_worker.layers.linear import ExpertLinear, Linear, RowParallelLinear
from model_worker.layers.norm import LayerNorm, RMSNorm, SplitRMSNorm
from model_worker.layers.weight import Change, Weight
from model_worker.models.spec import ModelSpec
from model_worker.quant.base import QuantMethod
from model_worker.quant.unquantized import UNQUANTIZED
from runtime.checkpoint.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Parts:
    """Makes the parts of one model, all of one dtype on one device."""

    config: ModelConfig
    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device | str
    group: RankGroup = SOLO
    quant: QuantMethod = UNQUANTIZED  # of linear layers, made at load of the head, too; not of routers
    layers: range = range(0)  # of this pipeline stage; nothing: all

    @property
    def own_layers(self) -> range:
        """Numbers of the layers that this process has."""
        return self.layers or range(self.config.num_layers)

    @property
    def is_first(self) -> bool:
        """True if this stage reads token ids."""
        return self.own_layers.start == 0

    @property
    def is_last(self) -> bool:
        """True if this stage has the head."""
        return self.own_layers.stop == self.config.num_layers

    @property
    def num_heads(self) -> int:
        """Number of query heads of this rank."""
        return self.config.num_heads // self.group.size

    @property
    def num_kv_heads(self) -> int:
        """Number of KV heads of this rank, including one that other ranks have, too."""
        return self.config.num_kv_heads_per_rank(self.group.size)

    def heads(self, num_heads: int) -> Cut:
        """Return this rank's part of the features of num_heads heads."""
        return by_heads(num_heads, self.config.head_dim, self.group.rank, self.group.size)

    def even(self, size: int) -> Cut:
        """Return this rank's part of a layer's inner dimension."""
        return even(size, self.group.rank, self.group.size)

    def norm(self, size: int | tuple[Cut, int], changes: Sequence[Change] = ()) -> RMSNorm | LayerNorm:
        """Make the family's norm over the last dimension, which every rank has completely."""
        config, kind = self.config, self.spec.norm
        if kind in ("layer", "layer_bias"):
            return LayerNorm(
                size,
                config.norm_eps,
                bias=kind == "layer_bias",
                dtype=self.dtype,
                device=self.device,
                changes=changes,
            )
        assert isinstance(size, int), "an RMS norm has one weight for all heads"
        return RMSNorm(size, config.norm_eps, **self._rms_options(changes))

    def split_norm(self, size: Cut, changes: Sequence[Change] = ()) -> RMSNorm:
        """Make the family's RMS norm over a vector that is divided among the ranks."""
        options = self._rms_options(changes)
        if self.group.size == 1:
            return RMSNorm(size, self.config.norm_eps, **options)
        return SplitRMSNorm(size, self.config.norm_eps, group=self.group, **options)

    def _rms_options(self, changes: Sequence[Change]) -> dict[str, Any]:
        kind = self.spec.norm
        if kind == "rms_offset":
            changes = (*changes, _plus_one)
        return {"dtype": self.dtype, "device": self.device, "wide": kind != "rms", "changes": changes}

    def linear(
        self,
        in_features: int,
        out_features: int | Cut | Mapping[str, Cut],
        *,
        bias: bool,
        changes: Sequence[Change] = (),
        quantized: bool = True,
    ) -> Linear:
        """Make a linear layer whose input every rank has completely, and whose output is divided among ranks.
        A mapping packs several outputs; the checkpoint has them separately unless the spec says otherwise.
        quantized: True to quantise it like the model's other layers.
        """
        return Linear(
            in_features,
            out_features,
            bias=bias,
            dtype=self.dtype,
            device=self.device,
            one_tensor=self.spec.packed_in_checkpoint,
            changes=changes,
            quant=self.quant if quantized else UNQUANTIZED,
        )

    def joining_linear(self, in_features: Cut, out_features: int, *, bias: bool) -> Linear:
        """Make a linear layer whose input is divided among ranks, and whose output every rank gets
        completely.
        """
        options: dict[str, Any] = {"dtype": self.dtype, "device": self.device, "quant": self.quant}
        if self.group.size == 1:
            return Linear(in_features, out_features, bias=bias, **options)
        return RowParallelLinear(in_features, out_features, group=self.group, bias=bias, **options)

    def expert_linear(
        self, num_experts: int, in_features: int | Cut, parts: Mapping[str, Cut]
    ) -> ExpertLinear:
        """Make one projection of every expert; the checkpoint has its parts under these names."""
        return ExpertLinear(
            num_experts, in_features, parts, dtype=self.dtype, device=self.device, quant=self.quant
        )

    def token_embedding(self, multiplier: float) -> TokenEmbedding:
        config, group = self.config, self.group
        options: dict[str, Any] = {"multiplier": multiplier, "dtype": self.dtype, "device": self.device}
        if group.size == 1:
            return TokenEmbedding(config.vocab_size, config.hidden_size, **options)
        vocabulary = by_vocabulary(config.vocab_size, group.rank, group.size)
        return VocabParallelEmbedding(vocabulary, config.hidden_size, group=group, **options)

    def lm_head(self, embedding: TokenEmbedding | None) -> LMHead:
        """Make the head, with the embedding's own weight if one is given."""
        config, group = self.config, self.group
        if embedding is not None:
            weight = embedding.weight
        else:
            rows = by_vocabulary(config.vocab_size, group.rank, group.size)
            weight = Weight(rows, config.hidden_size, dtype=self.dtype, device=self.device)
        return LMHead(weight, self.quant) if group.size == 1 else ParallelLMHead(weight, group, self.quant)


def _plus_one(weight: Tensor) -> Tensor:
    return weight + 1.0
