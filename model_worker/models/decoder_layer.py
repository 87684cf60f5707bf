"""Decoder layers, one class for each layout: where the norms are, and their names in checkpoints.

A layer adds the update of the layer before it to the residual stream, in place, and returns its own. So the
norm of the update, the addition and the next norm are one pass over memory.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from model_worker.kernels.combine import CombineLike
from model_worker.layers.bound import BoundLayer
from model_worker.layers.norm import NormLayer
from model_worker.models.attention import SelfAttention
from model_worker.models.feed_forward import make_feed_forward
from model_worker.models.parts import Parts
from model_worker.models.spec import LayerLayout
from model_worker.ops.base import Ops

Attend = Callable[[SelfAttention, Tensor], Tensor]
"""Function that runs a layer's attention on hidden [T, hidden_size] with the step's inputs."""


class Update(NamedTuple):
    """Update that is to be added to the residual stream."""

    value: Tensor  # [T, hidden_size]
    norm: NormLayer | None = None
    """Norm to be applied to the value before it is added."""


class DecoderLayer(BoundLayer):
    """Attention and feed-forward. Each layout says in which order they and the norms are applied."""

    _combine: CombineLike

    def __init__(self, parts: Parts, layer_id: int) -> None:
        super().__init__()
        self.self_attn = SelfAttention(parts, layer_id)
        self.mlp = make_feed_forward(parts, layer_id)
        self._multiplier = parts.config.residual_multiplier

    def bind(self, ops: Ops) -> None:
        """Bind the layer; its parts are bound separately. See BoundLayer.bind."""
        self._combine = ops.combine

    @abstractmethod
    def forward(self, residual: Tensor, update: Update | None, attend: Attend) -> Update:
        """Add `update` (None for the first layer) to residual [T, hidden_size] in place, and return the
        layer's own update.
        """

    def scaled(self, update: Tensor) -> Tensor:
        return update if self._multiplier == 1.0 else self._combine(update, scale=self._multiplier)

    def add(self, residual: Tensor, update: Tensor, scale: float = 1.0) -> None:
        """Add scale times the update to the residual, in place."""
        self._combine(update, scale=scale, add=residual, out=residual)


class PreNormLayer(DecoderLayer):
    def __init__(self, parts: Parts, layer_id: int) -> None:
        super().__init__(parts, layer_id)
        self.input_layernorm = parts.norm(parts.config.hidden_size)
        self.post_attention_layernorm = parts.norm(parts.config.hidden_size)

    def forward(self, residual: Tensor, update: Update | None, attend: Attend) -> Update:
        hidden = _add_and_norm(self.input_layernorm, residual, update)
        attended = self.scaled(attend(self.self_attn, hidden))
        hidden = self.post_attention_layernorm.add_and_norm(residual, attended)
        return Update(self.scaled(self.mlp(hidden)))


class PostNormLayer(DecoderLayer):
    def __init__(self, parts: Parts, layer_id: int) -> None:
        super().__init__(parts, layer_id)
        self.post_attention_layernorm = parts.norm(parts.config.hidden_size)
        self.post_feedforward_layernorm = parts.norm(parts.config.hidden_size)

    def forward(self, residual: Tensor, update: Update | None, attend: Attend) -> Update:
        if update is not None:
            self.add(residual, update.value)
        attended = self.post_attention_layernorm(attend(self.self_attn, residual))
        self.add(residual, attended, self._multiplier)
        return Update(self.scaled(self.post_feedforward_layernorm(self.mlp(residual))))


class SandwichLayer(DecoderLayer):
    def __init__(self, parts: Parts, layer_id: int) -> None:
        super().__init__(parts, layer_id)
        self.input_layernorm = parts.norm(parts.config.hidden_size)
        self.post_attention_layernorm = parts.norm(parts.config.hidden_size)
        self.pre_feedforward_layernorm = parts.norm(parts.config.hidden_size)
        self.post_feedforward_layernorm = parts.norm(parts.config.hidden_size)

    def forward(self, residual: Tensor, update: Update | None, attend: Attend) -> Update:
        hidden = _add_and_norm(self.input_layernorm, residual, update)
        attended = self._normed(self.post_attention_layernorm, attend(self.self_attn, hidden))
        hidden = self.pre_feedforward_layernorm.add_and_norm(residual, *attended)
        return self._normed(self.post_feedforward_layernorm, self.mlp(hidden))

    def _normed(self, norm: NormLayer, update: Tensor) -> Update:
        return Update(update, norm) if self._multiplier == 1.0 else Update(self.scaled(norm(update)))


class ParallelLayer(DecoderLayer):
    def __init__(self, parts: Parts, layer_id: int) -> None:
        super().__init__(parts, layer_id)
        self.input_layernorm = parts.norm(parts.config.hidden_size)

    def forward(self, residual: Tensor, update: Update | None, attend: Attend) -> Update:
        hidden = _add_and_norm(self.input_layernorm, residual, update)
        return Update(self.scaled(self._combine(attend(self.self_attn, hidden), add=self.mlp(hidden))))


LAYOUTS: dict[LayerLayout, type[DecoderLayer]] = {
    "pre_norm": PreNormLayer,
    "post_norm": PostNormLayer,
    "sandwich": SandwichLayer,
    "parallel": ParallelLayer,
}


def _add_and_norm(norm: NormLayer, residual: Tensor, update: Update | None) -> Tensor:
    normed: Tensor = norm(residual) if update is None else norm.add_and_norm(residual, *update)
    return normed
