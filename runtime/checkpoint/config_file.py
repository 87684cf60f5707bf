"""Keys of config.json, read under one name for each meaning. Knows how architectures spell the keys, but
draws no conclusions from the values.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from runtime.base.errors import ModelError
from runtime.checkpoint.architectures import ARCHITECTURES, TEXT_PARTS, Architecture, row_of
from runtime.checkpoint.checkpoint_config import (
    SHARED_KEYS,
    Count,
    convert_keys,
    read_decoder_keys,
    read_whole_keys,
)
from runtime.checkpoint.rope_config import PositiveFloat, PositiveInt

StructT = TypeVar("StructT", bound=msgspec.Struct)


# Ending of the class names of transformers' models that continue a text.
HEADLESS_SUFFIX = "Model"
"""Suffix of architecture names that end with the final norm, as embedding models are published."""
_DECODER_SUFFIXES = ("ForCausalLM", "LMHeadModel")


class _Preamble(msgspec.Struct):
    """Keys that decide whether a config.json can be read at all."""

    architectures: list[str] | None = None
    model_type: str = ""
    auto_map: Any = None
    quantization_config: Any = None


class ConfigFile(msgspec.Struct, kw_only=True):
    """Keys of config.json that are read. The default of each is what most architectures mean by
    its absence.
    """

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: Annotated[int, msgspec.Meta(gt=0, le=1 << 16)]  # tables by layer are made of it
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    max_position_embeddings: PositiveInt
    rms_norm_eps: PositiveFloat = 1e-6
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: PositiveFloat = 10000.0
    partial_rotary_factor: float | None = None
    original_max_position_embeddings: PositiveInt | None = None
    sliding_window: PositiveInt | None = None
    use_sliding_window: bool = False
    max_window_layers: Count = 28
    layer_types: list[str] | None = None


class OptionalKeys(msgspec.Struct, kw_only=True):
    """Keys that only some architectures have. They are read only if the architecture's row names them."""

    rotary_fraction: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    window_rope_theta: PositiveFloat | None = None
    sliding_window_pattern: PositiveInt = 2
    attention_scale: PositiveFloat | None = None
    attention_scale_dim: PositiveFloat | None = None  # the scale is one over the square root of this
    attention_softcap: PositiveFloat | None = None
    logits_softcap: PositiveFloat | None = None
    logits_multiplier: PositiveFloat | None = None
    logits_divisor: PositiveFloat = 1.0
    embedding_multiplier: PositiveFloat = 1.0
    residual_multiplier: PositiveFloat = 1.0
    qk_norm: bool = True
    num_experts: Count = 0
    num_experts_per_tok: PositiveInt = 1
    moe_intermediate_size: PositiveInt | None = None
    norm_topk_prob: bool = True
    expert_layer_step: PositiveInt = 1
    dense_layers: list[Count] | None = None
    use_bidirectional_attention: bool | None = None


class ConfigKeys(msgspec.Struct, frozen=True):
    """Content of a config.json under our names, and the table row by which it was read."""

    architecture: str
    row: Architecture
    file: ConfigFile
    optional: OptionalKeys


def read_config(path: Path, own: Architecture | None = None, overrides: str = "") -> ConfigKeys:
    """Return the content of a checkpoint's config.json. own: row to use instead of one of the table.
    overrides: as in CheckpointConfig. Raises ModelError for an architecture that needs code of its own or has
    no row.
    """
    preamble = _read_preamble(path, overrides)
    name, row = _architecture(preamble) if own is None else ((preamble.architectures or [""])[0], own)
    raw = read_decoder_keys(path, overrides)
    return ConfigKeys(
        name, row, _in_our_words(raw, row, ConfigFile), _in_our_words(raw, row, OptionalKeys, only_named=True)
    )


def has_spec(path: Path, overrides: str = "") -> bool:
    """Return True if the table has a row for the architecture of this config.json."""
    names = _read_preamble(path, overrides).architectures or []
    return any(row_of(_served_as(name)) is not None for name in names)


def refuse_without_spec(path: Path, overrides: str = "") -> None:
    """Raise ModelError if this model can only be computed by a spec, or not at all."""
    preamble = _read_preamble(path, overrides)
    _refuse_own_code(preamble)
    _refuse_quantised(preamble)
    names = preamble.architectures or []
    if names and names[0] in TEXT_PARTS:
        raise ModelError(
            f"--model-impl transformers cannot serve {names[0]}: its text part has a spec; leave the flag "
            "out."
        )
    if not names or not names[0].endswith(_DECODER_SUFFIXES):
        raise ModelError(
            f"Architecture {_found(preamble)} is not a decoder of text ({', '.join(_DECODER_SUFFIXES)}): "
            "models with other inputs or outputs are not supported."
        )


def known_keys(raw: Mapping[str, Any], own: Architecture | None = None) -> set[str]:
    """Return the keys that a decoder's config.json has, or that any code here reads from it, except keys
    about code.
    """
    names = raw.get("architectures")
    rows = (
        [row_of(_served_as(name)) for name in names if isinstance(name, str)]
        if isinstance(names, list)
        else []
    )
    row = own or next((row for row in rows if row is not None), None)
    known = {"architectures", "model_type", "quantization_config", *SHARED_KEYS, *raw}
    if row is not None:
        for kind in (ConfigFile, OptionalKeys):
            for field in msgspec.structs.fields(kind):
                if kind is ConfigFile or field.name in row.keys:
                    known.update(_spellings(row, field.name))
    return known - {"auto_map", "text_config"}


def _read_preamble(path: Path, overrides: str) -> _Preamble:
    return convert_keys(path, read_whole_keys(path, overrides), _Preamble)


def _architecture(preamble: _Preamble) -> tuple[str, Architecture]:
    names = preamble.architectures or []
    served = [(name, row) for name in map(_served_as, names) if (row := row_of(name)) is not None]
    if not (served and served[0][1].ships_code):
        _refuse_own_code(preamble)
    if served:
        return served[0]
    raise ModelError(
        f"Architecture {_found(preamble)} is not supported. Supported architectures: "
        f"{_SUPPORTED}. With --model-impl transformers others may be, and with --model-spec those that you "
        "have a spec for (docs/adding_a_model.md)."
    )


_SUPPORTED = ", ".join((*ARCHITECTURES, *TEXT_PARTS))


def _served_as(architecture: str) -> str:
    """Return the architecture whose row is used: itself, or for a bare decoder the one with a head."""
    if architecture.endswith(HEADLESS_SUFFIX):
        return architecture.removesuffix(HEADLESS_SUFFIX) + "ForCausalLM"
    return architecture


def _refuse_own_code(preamble: _Preamble) -> None:
    if preamble.auto_map is not None:
        raise ModelError(
            "config.json has auto_map: the model comes with its own code, which is never run. "
            f"Supported architectures: {_SUPPORTED}. One that you have a spec for is named with --model-spec "
            "(docs/adding_a_model.md)."
        )


def _refuse_quantised(preamble: _Preamble) -> None:
    if preamble.quantization_config is not None:
        raise ModelError(
            "config.json has quantization_config: quantised checkpoints are not supported without a spec. "
            "Use the checkpoint in bfloat16, float16 or float32."
        )


def _found(preamble: _Preamble) -> str:
    return ", ".join(preamble.architectures or []) or f"none (model_type {preamble.model_type!r})"


def _in_our_words(
    raw: Mapping[str, Any], row: Architecture, kind: type[StructT], *, only_named: bool = False
) -> StructT:
    """Read the fields of `kind`, with the key names and defaults of this architecture."""
    spelled = {
        name: _spellings(row, name) for name in kind.__struct_fields__ if not only_named or name in row.keys
    }
    values = {}
    for name, keys in spelled.items():
        for given in (raw, row.defaults):
            found = [given[key] for key in keys if key in given]
            if found:
                values[name] = found[0]
                break
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        words = str(error)
        for name, keys in spelled.items():
            words = words.replace(f"`$.{name}", f"`$.{keys[0]}")
        raise ModelError(f"config.json cannot be read: {words}") from error


def _spellings(row: Architecture, name: str) -> tuple[str, ...]:
    keys = row.keys.get(name, name)
    return (keys,) if isinstance(keys, str) else keys
