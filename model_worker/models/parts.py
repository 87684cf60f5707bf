"""What every module of the decoder is built from: the config, the spec, and norms and projections by them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model_worker.layers.linear import Linear
from model_worker.layers.norm import LayerNorm, RMSNorm
from model_worker.layers.weight import Change
from model_worker.models.spec import ModelSpec
from runtime.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Parts:
    """Makes the parts of one model, all of one dtype on one device."""

    config: ModelConfig
    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device | str

    def norm(self, size: int | tuple[int, int], changes: Sequence[Change] = ()) -> RMSNorm | LayerNorm:
        """The family's norm over the last dimension."""
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
        if kind == "rms_offset":
            changes = (*changes, _plus_one)
        return RMSNorm(
            size,
            config.norm_eps,
            dtype=self.dtype,
            device=self.device,
            wide=kind != "rms",
            changes=changes,
        )

    def linear(
        self,
        in_features: int,
        out_features: int | Mapping[str, int],
        *,
        bias: bool,
        changes: Sequence[Change] = (),
    ) -> Linear:
        """A projection. A mapping packs several; the checkpoint has them apart unless the spec says not."""
        if self.spec.packed_in_checkpoint and not isinstance(out_features, int):
            out_features = sum(out_features.values())
        return Linear(
            in_features, out_features, bias=bias, dtype=self.dtype, device=self.device, changes=changes
        )


def _plus_one(weight: Tensor) -> Tensor:
    return weight + 1.0
