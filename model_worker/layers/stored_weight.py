"""StoredWeight: base class of layers with one large weight, whose QuantMethod says how it is stored."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from model_worker.layers.weight import Weight
from model_worker.quant.base import QuantMethod
from model_worker.quant.unquantized import UNQUANTIZED


class StoredWeight(nn.Module):
    """A weight and, if its method has them, a float32 scale for each output. Loading order: `load_plain` if
    the checkpoint has not quantised this weight, the loader's values, `compress`.
    """

    def __init__(
        self, make: Callable[..., Weight], in_features: object, dtype: torch.dtype, quant: QuantMethod
    ) -> None:
        """make: creates a Weight of the given columns and dtype."""
        super().__init__()
        self._make = make
        self._in_features = in_features
        self._dtype = dtype
        self._store_as(quant)

    def _store_as(self, quant: QuantMethod) -> None:
        self.quant = quant
        self.weight = self._make(self._in_features, dtype=quant.stored or self._dtype)
        self.weight_scale: Weight | None = None
        if quant.stored is not None:
            self.weight_scale = self._make(1, dtype=torch.float32)

    def load_plain(self) -> None:
        """Expect a weight in the model's dtype, unlike others of the model. Call it before loading."""
        self._store_as(UNQUANTIZED)

    def compress(self) -> None:
        """Convert the weight to its stored form, once, when it is loaded."""
        if (compressed := self.quant.compress(self.weight.data)) is not None:
            self.weight_scale = self._make(1, dtype=torch.float32)
            self.weight.data, self.weight_scale.data = compressed
