"""Unquantized: weights in the model's own dtype."""

from __future__ import annotations

from torch import Tensor

from model_worker.quant.base import QuantMethod


class Unquantized(QuantMethod):
    """QuantMethod that keeps weights in the model's own dtype."""

    stored = None

    def can_store(self, weight: Tensor) -> bool:
        return True

    def compress(self, weight: Tensor) -> None:
        return None


UNQUANTIZED = Unquantized()
