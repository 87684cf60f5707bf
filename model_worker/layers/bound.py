"""BoundLayer: what all layers have in common that compute by an Ops."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import nn

from model_worker.ops.base import Ops


class BoundLayer(nn.Module, ABC):
    """A layer that computes from when it is bound; once, when its weights are loaded."""

    @abstractmethod
    def bind(self, ops: Ops) -> None:
        """Compute by ops from now on. Some Ops rearrange weights in place, which cannot be loaded again."""
