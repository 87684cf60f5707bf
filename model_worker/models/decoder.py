"""Decoder: embedding, layers and final norm of every family. Knows no file and no plan."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from model_worker.attention.base import AttentionBackend
from model_worker.attention.forward_batch import ForwardBatch
from model_worker.attention.taps import StepTaps
from model_worker.layers.bound import BoundLayer
from model_worker.layers.embedding import TokenEmbedding
from model_worker.layers.norm import NormLayer
from model_worker.layers.rotary import RotaryEmbedding
from model_worker.memory.kv_pool import MHATokenToKVPool
from model_worker.models.attention import SelfAttention
from model_worker.models.decoder_layer import LAYOUTS, Update
from model_worker.models.parts import Parts
from model_worker.ops.base import Ops, TakeRows
from runtime.sampling.additional_outputs import HIDDEN_STATES


class StageOutput(NamedTuple):
    """Hidden states that a pipeline stage sends to the next one, each [T, hidden_size]."""

    residual: Tensor
    update: Tensor
    """Update that is still to be added to the residual stream; its norm is already applied."""


class Decoder(BoundLayer):
    """Embedding, layers and final norm; on a pipeline stage the part that belongs to it."""

    _take: TakeRows
    embed_tokens: TokenEmbedding
    """Token embedding. Stages after the first have none, except for the last one if the embedding is also the
    head.
    """
    norm: NormLayer
    """Final norm, on the last stage only."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        config, spec, device = parts.config, parts.spec, parts.device
        multiplier = config.embedding_multiplier
        if spec.scaled_embedding:
            multiplier *= math.sqrt(config.hidden_size)
        self.is_first, self.is_last = parts.is_first, parts.is_last
        if parts.is_first or (parts.is_last and config.tie_word_embeddings):
            self.embed_tokens = parts.token_embedding(multiplier)
        layer_type = LAYOUTS[spec.layout]
        self.layers = nn.ModuleList()
        for layer_id in parts.own_layers:
            self.layers.add_module(str(layer_id), layer_type(parts, layer_id))
        if parts.is_last:
            self.norm = parts.norm(config.hidden_size)
        self._like = torch.empty(0, config.hidden_size, dtype=parts.dtype, device=device)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, device)
        self.window_rotary: RotaryEmbedding | None = None
        if config.window_rope is not None:
            self.window_rotary = RotaryEmbedding(config.window_rope, config.head_dim, device)
        self._has_window = [window is not None for window in config.sliding_windows]

    def bind(self, ops: Ops) -> None:
        """Bind the look-up of output rows and the rotary embeddings; layers are bound separately."""
        self._take = ops.take_rows(self._like)
        for rotary in (self.rotary, self.window_rotary):
            if rotary is not None:
                rotary.bind(ops)

    def forward(
        self, batch: ForwardBatch, kv_pool: MHATokenToKVPool, backend: AttentionBackend
    ) -> Tensor | StageOutput:
        """Return the final hidden states [W, hidden_size] of the tokens at batch.output_indices. A pipeline
        stage other than the first continues from batch.arrived, in place; one other than the last returns a
        StageOutput.
        """
        update: Update | None = None
        if batch.arrived is not None:
            residual, update = batch.arrived[0], Update(batch.arrived[1])
        else:
            assert self.is_first, "a stage with nothing from the one before"
            residual = self.embed_tokens(batch.input_ids)
            if batch.virtual is not None:
                where, vectors = batch.virtual
                residual[where] = vectors
        cos_sin = window_cos_sin = self.rotary.cos_sin(batch.positions)
        if self.window_rotary is not None:
            window_cos_sin = self.window_rotary.cos_sin(batch.positions)

        def attend(attention: SelfAttention, hidden: Tensor) -> Tensor:
            turns = window_cos_sin if self._has_window[attention.layer.layer_id] else cos_sin
            attended: Tensor = attention(hidden, turns, batch, kv_pool, backend)
            return attended

        taps = batch.taps
        for layer_id, layer in enumerate(self.layers):
            if taps is not None and (name := f"{HIDDEN_STATES}:{layer_id}") in taps.names:
                taps.take(name, _stream(taps, residual, update))
            update = layer(residual, update, attend)
        assert update is not None, "a model has at least one layer"
        if not self.is_last:
            value = update.value if update.norm is None else update.norm(update.value)
            return StageOutput(residual, value)
        wanted = batch.output_indices
        if wanted is not None:
            residual = self._take(residual, wanted)
            update = update._replace(value=self._take(update.value, wanted))
        final: Tensor = self.norm.add_and_norm(residual, *update)
        if taps is not None:
            for name in {HIDDEN_STATES, f"{HIDDEN_STATES}:{len(self.layers)}"} & taps.names:
                taps.take_outputs(name, final)
        return final


def _stream(taps: StepTaps, residual: Tensor, update: Update | None) -> Tensor:
    """Return rows of the residual stream including an update that the next layer will add in place."""
    rows = taps.pick(residual)
    if update is None:
        return rows
    added = taps.pick(update.value)
    return rows + (added if update.norm is None else update.norm(added))
