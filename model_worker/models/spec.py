"""ModelSpec: in what a family differs from the plain transformer. Numbers are in ModelConfig, not here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from runtime.base.registry import resolve

# Whether a projection has a bias: "config" asks attention_bias or mlp_bias of the checkpoint's config.json.
BiasRule = Literal["never", "always", "config"]

Norm = Literal["rms", "rms_wide", "rms_offset", "layer", "layer_bias"]
LayerLayout = Literal["pre_norm", "post_norm", "sandwich", "parallel"]
QkNorm = Literal["none", "head", "each_head", "projection"]
RotaryPairs = Literal["halves", "adjacent"]

_WORDS: dict[str, Any] = {
    "qkv_bias": BiasRule,
    "o_bias": BiasRule,
    "mlp_bias": BiasRule,
    "layout": LayerLayout,
    "norm": Norm,
    "qk_norm": QkNorm,
    "rotary_pairs": RotaryPairs,
}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder with rotary positions and grouped-query attention. The defaults are the plain transformer.

    layout: where a layer has norms.
        "pre_norm"   x + attention(norm(x)), then x + mlp(norm(x))
        "post_norm"  x + norm(attention(x)), then x + norm(mlp(x))
        "sandwich"   x + norm(attention(norm(x))), then the same with mlp
        "parallel"   x + attention(norm(x)) + mlp(norm(x)), of one norm
    norm: "rms" is weight times the rounded norm; "rms_wide" multiplies before rounding, and so does
        "rms_offset", whose scale is one plus the weight; "layer" subtracts the mean and has no bias.
    qk_norm: over each head with one weight ("head") or its own ("each_head"), or over all heads together.
        The config may turn it off.
    rotary_pairs: dimension i of a head turns with i + half of them, or with its neighbour.
    names: our name of a module, one segment of a path -> the checkpoint's.
    """

    qkv_bias: BiasRule = "never"
    o_bias: BiasRule = "never"
    mlp_bias: BiasRule = "never"
    layout: LayerLayout = "pre_norm"
    norm: Norm = "rms"
    qk_norm: QkNorm = "none"
    rotary_pairs: RotaryPairs = "halves"
    gated_mlp: bool = True  # down(act(gate(x)) * up(x)); else down(act(up(x)))
    scaled_embedding: bool = False  # by the square root of hidden_size
    packed_in_checkpoint: bool = False  # qkv_proj and gate_up_proj are one tensor each there, too
    names: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ValueError for a value that is not implemented, because a spec may be the user's own."""
        for name, kind in _WORDS.items():
            value, known = getattr(self, name), get_args(kind)
            if value not in known:
                raise ValueError(f"ModelSpec: {name} {value!r} is unknown; known: {', '.join(known)}")

    def checkpoint_name(self, name: str) -> str:
        """Return the checkpoint's name of the tensor called `name` here."""
        return ".".join(self.names.get(segment, segment) for segment in name.split("."))


def has_bias(rule: BiasRule, config_says: bool) -> bool:
    """Return True if there is a bias, by a rule and the checkpoint's own flag."""
    return config_says if rule == "config" else rule == "always"


def resolve_spec(name: str) -> ModelSpec:
    """Return the spec with the import string `package.module:NAME`. Raises ConfigError."""
    spec = resolve("model architecture", name, {})
    assert isinstance(spec, ModelSpec)
    return spec
