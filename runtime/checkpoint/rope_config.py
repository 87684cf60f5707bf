"""RopeConfig: parameters of a model's rotary embedding, read from either generation of config.json, checked
and complete. The worker computes the frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

import msgspec

from runtime.base.errors import ModelError

PositiveInt = Annotated[int, msgspec.Meta(gt=0, le=2**31 - 1)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
Fraction = Annotated[float, msgspec.Meta(gt=0, le=1)]
RopeType = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"]

_OLD_NAMES = {"su": "longrope"}
_NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}


class RopeConfig(msgspec.Struct, frozen=True):
    """Rotary embedding of a head's first rotary_dim dimensions.

    factor belongs to linear, dynamic, yarn and llama3; original_max_position_embeddings, in tokens, to all
    but default and linear. attention_factor multiplies cosines and sines. divisors (longrope) divide the
    frequencies one by one: rotary_dim / 2 of them.
    """

    theta: float
    rotary_dim: int
    type: RopeType = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    divisors: tuple[float, ...] = ()


class RopeContext(msgspec.Struct, frozen=True):
    """Values of config.json outside the rotary parameters on which these depend."""

    theta: float
    head_dim: int
    max_position_embeddings: int
    served_tokens: int  # the longest sequence that will be served
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float | None = None
    may_be_partial: bool = False
    rotates_axes: bool = False  # see TextPart


class _RopeParameters(msgspec.Struct):
    """Rotary parameters as files spell them (rope_parameters, or the older rope_scaling). An unknown key is
    an error.
    """

    rope_theta: PositiveFloat | None = None
    rope_type: str | None = None
    type: str | None = None  # the older name of rope_type
    factor: PositiveFloat | None = None
    low_freq_factor: PositiveFloat | None = None
    high_freq_factor: PositiveFloat | None = None
    original_max_position_embeddings: PositiveInt | None = None
    partial_rotary_factor: Fraction | None = None
    attention_factor: PositiveFloat | None = None
    beta_fast: PositiveFloat | None = None
    beta_slow: PositiveFloat | None = None
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    short_factor: tuple[PositiveFloat, ...] | None = None
    long_factor: tuple[PositiveFloat, ...] | None = None


def read_rope(spelled: Mapping[str, Any], context: RopeContext) -> RopeConfig:
    """Return the rotary embedding for a dict of config.json. Raises ModelError for kinds that are not
    supported.
    """
    if not isinstance(spelled, Mapping):
        raise ModelError(f"config.json: rope_parameters: an object is needed, got {spelled!r}.")
    if context.rotates_axes:
        spelled = _of_text(spelled, context.head_dim)
    rope_type = spelled.get("rope_type", spelled.get("type", "default"))
    if isinstance(rope_type, str):
        rope_type = _OLD_NAMES.get(rope_type, rope_type)
    if rope_type not in get_args(RopeType):
        known = ", ".join(get_args(RopeType))
        raise ModelError(f"config.json: rope type {rope_type!r} is not supported. Supported: {known}.")
    try:
        raw = msgspec.convert(dict(spelled), _RopeParameters)
    except msgspec.ValidationError as error:
        raise ModelError(f"config.json: rope_parameters: {error}") from error
    unknown = sorted(spelled.keys() - _RopeParameters.__struct_fields__)
    if unknown:
        raise ModelError(f"config.json: rope_parameters has unsupported keys: {', '.join(unknown)}.")
    missing = [name for name in _NEEDED[rope_type] if getattr(raw, name) is None]
    if missing:
        raise ModelError(f"config.json: rope type {rope_type} lacks {', '.join(missing)}.")
    rope = RopeConfig(raw.rope_theta or context.theta, _rotary_dim(raw, context), rope_type)
    match rope_type:
        case "linear":
            return msgspec.structs.replace(rope, factor=raw.factor)
        case "dynamic":
            if rope.rotary_dim == 2:
                raise ModelError("config.json: rope type dynamic needs more than one pair of dimensions.")
            # Relative to the length that the model itself declares.
            return _with(rope, raw, "factor", original=context.max_position_embeddings)
        case "llama3":
            return _llama3(rope, raw, context)
        case "yarn":
            return _yarn(rope, raw, context)
        case "longrope":
            return _longrope(rope, raw, context)
    return rope


def _of_text(spelled: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """Return the parameters without the division among image axes. A text token has the same position on each
    axis.
    """
    kept = {key: value for key, value in spelled.items() if key != "mrope_section"}
    for key in ("rope_type", "type"):
        if kept.get(key) == "mrope":
            kept[key] = "default"
    if "type" in kept and "rope_type" in kept:
        del kept["type"]  # the older name, left beside the newer one
    sections = spelled.get("mrope_section")
    if sections is not None:
        try:
            num_pairs = sum(msgspec.convert(sections, list[PositiveInt]))
        except msgspec.ValidationError as error:
            raise ModelError(f"config.json: rope_parameters: mrope_section: {error}") from error
        if 2 * num_pairs != head_dim:
            raise ModelError(
                f"config.json: rope_parameters: mrope_section has {num_pairs} pairs of dimensions, but a "
                f"head has {head_dim // 2}."
            )
    return kept


def _with(rope: RopeConfig, raw: _RopeParameters, *names: str, original: int) -> RopeConfig:
    given = {name: value for name in names if (value := getattr(raw, name)) is not None}
    return msgspec.structs.replace(rope, original_max_position_embeddings=original, **given)


def _original(raw: _RopeParameters, context: RopeContext) -> int:
    """Return the context length before it was extended: from beside the rotary parameters, from among them,
    or the present one.
    """
    return (
        context.original_max_position_embeddings
        or raw.original_max_position_embeddings
        or context.max_position_embeddings
    )


def _rotary_dim(raw: _RopeParameters, context: RopeContext) -> int:
    if raw.partial_rotary_factor not in (None, 1.0) and not context.may_be_partial:
        raise ModelError(
            f"config.json: partial_rotary_factor {raw.partial_rotary_factor} is not supported; it must be 1."
        )
    fraction = raw.partial_rotary_factor or context.partial_rotary_factor or 1.0
    rotary_dim = int(context.head_dim * fraction)
    if rotary_dim < 2 or rotary_dim % 2:
        raise ModelError(f"config.json: {rotary_dim} of {context.head_dim} dimensions cannot be rotated.")
    return rotary_dim


def _llama3(rope: RopeConfig, raw: _RopeParameters, context: RopeContext) -> RopeConfig:
    rope = _with(rope, raw, "factor", "low_freq_factor", "high_freq_factor", original=_original(raw, context))
    if rope.high_freq_factor <= rope.low_freq_factor:
        raise ModelError("config.json: rope high_freq_factor must be greater than low_freq_factor.")
    return rope


def _yarn(rope: RopeConfig, raw: _RopeParameters, context: RopeContext) -> RopeConfig:
    assert raw.factor is not None
    attention_factor = raw.attention_factor
    if attention_factor is None:
        attention_factor = _mscale(raw.factor)
        if raw.mscale and raw.mscale_all_dim:
            attention_factor = _mscale(raw.factor, raw.mscale) / _mscale(raw.factor, raw.mscale_all_dim)
    rope = _with(rope, raw, "factor", "beta_fast", "beta_slow", "truncate", original=_original(raw, context))
    return msgspec.structs.replace(rope, attention_factor=attention_factor)


def _mscale(scale: float, weight: float = 1.0) -> float:
    """Return the factor by which attention is sharpened for a context `scale` times as long (YaRN, Peng et
    al., 2023).
    """
    return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0


def _longrope(rope: RopeConfig, raw: _RopeParameters, context: RopeContext) -> RopeConfig:
    """Choose one set of divisors for all sequences. Keys in the cache are rotated once and shared, so a
    sequence cannot change to the other set while it grows.
    """
    original = _original(raw, context)
    if original == 1:
        raise ModelError("config.json: rope type longrope extends a context of more than one token.")
    divisors = raw.long_factor if context.served_tokens > original else raw.short_factor
    assert divisors is not None
    if len(divisors) != rope.rotary_dim // 2:
        raise ModelError(
            f"config.json: rope type longrope has {len(divisors)} factors, not one for each of "
            f"{rope.rotary_dim // 2} frequencies."
        )
    factor = raw.factor or context.max_position_embeddings / original
    attention_factor = raw.attention_factor
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return msgspec.structs.replace(
        rope,
        original_max_position_embeddings=original,
        attention_factor=attention_factor,
        divisors=divisors,
    )
