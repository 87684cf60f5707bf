"""ModelSpec: in what a family differs from the plain transformer. Numbers are in ModelConfig, not here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Whether a projection has a bias: "config" asks attention_bias or mlp_bias of the checkpoint's config.json.
BiasRule = Literal["never", "always", "config"]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A pre-norm decoder with rotary positions, grouped-query attention and a gated feed-forward layer."""

    qkv_bias: BiasRule = "never"
    o_bias: BiasRule = "never"
    mlp_bias: BiasRule = "never"
    qk_norm: bool = False  # RMSNorm over each query and key head, before the rotation


def has_bias(rule: BiasRule, config_says: bool) -> bool:
    """Resolve a rule against the checkpoint's own flag."""
    return config_says if rule == "config" else rule == "always"
