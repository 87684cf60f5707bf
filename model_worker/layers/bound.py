"""BoundLayer: base class of layers that compute through an Ops."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import nn

from model_worker.ops.base import Ops


class BoundLayer(nn.Module, ABC):
    """A layer that can compute once it is bound, after its weights are loaded. It is bound once."""

    @abstractmethod
    def bind(self, ops: Ops) -> None:
        """Compute through `ops` from now on. Some Ops rearrange weights in place, after which they cannot be
        loaded again.
        """
