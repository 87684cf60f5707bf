"""CausalLM: the one decoder behind every family, built from a ModelConfig and a ModelSpec.

Module names follow the checkpoints: a parameter's name is its tensor's name. Knows no file and no plan.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from model_worker.attention.base import AttentionBackend, AttentionLayer
from model_worker.forward_batch import ForwardBatch
from model_worker.kernels.native.library import NativeKernels
from model_worker.kernels.native.operators import LANES, SiluAndMul
from model_worker.kernels.silu_and_mul import silu_and_mul
from model_worker.kv_pool import MHATokenToKVPool
from model_worker.layers.embedding import LMHead, TokenEmbedding
from model_worker.layers.linear import Linear
from model_worker.layers.norm import RMSNorm
from model_worker.layers.rotary import RotaryEmbedding
from model_worker.layers.weight import Weight
from model_worker.models.spec import ModelSpec, has_bias
from runtime.model_config import ModelConfig


class SelfAttention(nn.Module):
    """Grouped-query attention of one layer."""

    def __init__(
        self,
        config: ModelConfig,
        spec: ModelSpec,
        layer_id: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.layer = AttentionLayer(
            layer_id=layer_id,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            sliding_window=config.sliding_windows[layer_id],
        )
        q_size = config.num_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.split = (q_size, kv_size, kv_size)
        self.qkv_proj = Linear(
            config.hidden_size,
            {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size},
            bias=has_bias(spec.qkv_bias, config.attention_bias),
            dtype=dtype,
            device=device,
        )
        self.o_proj = Linear(
            q_size,
            config.hidden_size,
            bias=has_bias(spec.o_bias, config.attention_bias),
            dtype=dtype,
            device=device,
        )
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if spec.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype, device=device)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype, device=device)

    def forward(
        self,
        hidden: Tensor,
        cos_sin: Tensor,
        batch: ForwardBatch,
        kv_pool: MHATokenToKVPool,
        backend: AttentionBackend,
    ) -> Tensor:
        """hidden [T, hidden_size] -> [T, hidden_size]."""
        heads = (-1, self.layer.head_dim)
        q, k, v = (part.unflatten(-1, heads) for part in self.qkv_proj(hidden).split(self.split, dim=-1))
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q)
            k = self.k_norm(k)
        attended = backend.forward(self.layer, q, k, v, batch, kv_pool, cos_sin)
        projected: Tensor = self.o_proj(attended.flatten(1))
        return projected


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(
        self, config: ModelConfig, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        bias = has_bias(spec.mlp_bias, config.mlp_bias)
        width = config.intermediate_size
        self.gate_up_proj = Linear(
            config.hidden_size, {"gate_proj": width, "up_proj": width}, bias=bias, dtype=dtype, device=device
        )
        self.down_proj = Linear(width, config.hidden_size, bias=bias, dtype=dtype, device=device)
        self._activate: Callable[[Tensor], Tensor] = silu_and_mul
        self._width = width

    def use_native(self, kernels: NativeKernels) -> None:
        """Compute the gate with the C++ kernel from now on, where it has one for this width."""
        if self._width % LANES == 0:
            self._activate = SiluAndMul(kernels)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [T, hidden_size] -> [T, hidden_size]."""
        projected: Tensor = self.down_proj(self._activate(self.gate_up_proj(hidden)))
        return projected


class DecoderLayer(nn.Module):
    """Norm, attention, norm, feed-forward, each half added to the residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        spec: ModelSpec,
        layer_id: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden_size, eps, dtype=dtype, device=device)
        self.self_attn = SelfAttention(config, spec, layer_id, dtype=dtype, device=device)
        self.post_attention_layernorm = RMSNorm(hidden_size, eps, dtype=dtype, device=device)
        self.mlp = GatedMLP(config, spec, dtype=dtype, device=device)

    def forward(
        self,
        residual: Tensor,
        update: Tensor | None,
        cos_sin: Tensor,
        batch: ForwardBatch,
        kv_pool: MHATokenToKVPool,
        backend: AttentionBackend,
    ) -> Tensor:
        """Add the layer before's update to residual in place; return this layer's. All [T, hidden_size].

        The addition is left to the next norm so that both are one pass over memory.
        """
        if update is None:
            hidden = self.input_layernorm(residual)
        else:
            hidden = self.input_layernorm.add_and_norm(residual, update)
        attended = self.self_attn(hidden, cos_sin, batch, kv_pool, backend)
        hidden = self.post_attention_layernorm.add_and_norm(residual, attended)
        output: Tensor = self.mlp(hidden)
        return output


class Decoder(nn.Module):
    """Embedding, layers and the final norm."""

    def __init__(
        self, config: ModelConfig, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.embed_tokens = TokenEmbedding(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            DecoderLayer(config, spec, layer_id, dtype=dtype, device=device)
            for layer_id in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, device)

    def forward(self, batch: ForwardBatch, kv_pool: MHATokenToKVPool, backend: AttentionBackend) -> Tensor:
        """The final hidden states [S, hidden_size] of the tokens at batch.sample_indices."""
        residual: Tensor = self.embed_tokens(batch.input_ids)
        cos_sin = self.rotary.cos_sin(batch.positions)
        update: Tensor | None = None
        for layer in self.layers:
            update = layer(residual, update, cos_sin, batch, kv_pool, backend)
        assert update is not None, "a model has at least one layer"
        sampled = batch.sample_indices
        return self.norm.add_and_norm(residual.index_select(0, sampled), update.index_select(0, sampled))


class CausalLM(nn.Module):
    """A decoder with a language-model head. Weights are uninitialised until the loader fills them."""

    def __init__(
        self, config: ModelConfig, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, spec, dtype=dtype, device=device)
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
        """Compute the batch's tokens, write their KV, return logits [S, vocab_size] float32.

        backend.prepare(batch) must have run. Row s of the result belongs to token batch.sample_indices[s]; S
        may be 0. Call it under torch.inference_mode: no gradient is needed, and each operation gets cheaper.
        """
        logits: Tensor = self.lm_head(self.model(batch, kv_pool, backend))
        return logits
