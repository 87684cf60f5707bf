"""CausalLM: the one decoder behind every family, built from a ModelConfig and a ModelSpec.

Module names follow the checkpoints: a parameter's name is its tensor's name. Knows no file and no plan.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from model_worker.attention.base import AttentionBackend
from model_worker.forward_batch import ForwardBatch
from model_worker.kernels.native.library import NativeKernels
from model_worker.kv_pool import MHATokenToKVPool
from model_worker.layers.embedding import LMHead, TokenEmbedding
from model_worker.layers.linear import Linear
from model_worker.layers.norm import RMSNorm
from model_worker.layers.rotary import RotaryEmbedding
from model_worker.layers.weight import Weight
from model_worker.models.attention import SelfAttention
from model_worker.models.decoder_layer import LAYOUTS
from model_worker.models.feed_forward import GatedMLP
from model_worker.models.parts import Parts
from model_worker.models.spec import ModelSpec
from runtime.model_config import ModelConfig


class Decoder(nn.Module):
    """Embedding, layers and the final norm."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        config, spec, device = parts.config, parts.spec, parts.device
        multiplier = config.embedding_multiplier
        if spec.scaled_embedding:
            multiplier *= math.sqrt(config.hidden_size)
        self.embed_tokens = TokenEmbedding(
            config.vocab_size, config.hidden_size, multiplier=multiplier, dtype=parts.dtype, device=device
        )
        layer_type = LAYOUTS[spec.layout]
        self.layers = nn.ModuleList(layer_type(parts, layer_id) for layer_id in range(config.num_layers))
        self.norm = parts.norm(config.hidden_size)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, device)
        self.window_rotary: RotaryEmbedding | None = None
        if config.window_rope is not None:
            self.window_rotary = RotaryEmbedding(config.window_rope, config.head_dim, device)

    def forward(self, batch: ForwardBatch, kv_pool: MHATokenToKVPool, backend: AttentionBackend) -> Tensor:
        """The final hidden states [W, hidden_size] of the tokens at batch.output_indices."""
        residual: Tensor = self.embed_tokens(batch.input_ids)
        cos_sin = window_cos_sin = self.rotary.cos_sin(batch.positions)
        if self.window_rotary is not None:
            window_cos_sin = self.window_rotary.cos_sin(batch.positions)

        def attend(attention: SelfAttention, hidden: Tensor) -> Tensor:
            turns = cos_sin if attention.layer.sliding_window is None else window_cos_sin
            attended: Tensor = attention(hidden, turns, batch, kv_pool, backend)
            return attended

        update: Tensor | None = None
        for layer in self.layers:
            update = layer(residual, update, attend)
        assert update is not None, "a model has at least one layer"
        wanted = batch.output_indices
        return self.norm.add_and_norm(residual.index_select(0, wanted), update.index_select(0, wanted))


class CausalLM(nn.Module):
    """A decoder with a language-model head. Weights are uninitialised until the loader fills them."""

    def __init__(
        self, config: ModelConfig, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.config = config
        self.spec = spec
        self.model = Decoder(Parts(config, spec, dtype, device))
        if config.tie_word_embeddings:
            head = self.model.embed_tokens.weight
        else:
            head = Weight(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.lm_head = LMHead(head)

    def use_native(self, kernels: NativeKernels) -> None:
        """Compute with the C++ kernels from now on, where they exist. Weights must be loaded: some are
        rearranged in place and cannot be loaded again.
        """
        for module in self.modules():
            if isinstance(module, Linear | LMHead | TokenEmbedding | RMSNorm | GatedMLP):
                module.use_native(kernels)

    def forward(self, batch: ForwardBatch, kv_pool: MHATokenToKVPool, backend: AttentionBackend) -> Tensor:
        """Compute the batch's tokens, write their KV, return final hidden states [W, hidden_size].

        backend.prepare(batch) must have run. Row w of the result belongs to token batch.output_indices[w]; W
        may be 0. Call it under torch.inference_mode: no gradient is needed, and each operation gets cheaper.
        """
        hidden: Tensor = self.model(batch, kv_pool, backend)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """The head: hidden [n, hidden_size] -> logits [n, vocab_size] float32. The caller decides how many
        rows at a time, for they are large.
        """
        logits: Tensor = self.lm_head(hidden)
        multiplier, softcap = self.config.logits_multiplier, self.config.logits_softcap
        if multiplier != 1.0:
            logits *= multiplier
        if softcap is not None:
            logits.div_(softcap).tanh_().mul_(softcap)
        return logits
