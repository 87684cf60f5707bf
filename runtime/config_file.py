"""config.json and generation_config.json as files: what is read of them, under one name per thing.

Knows how architectures spell their keys; draws no conclusion from the values.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from runtime.architectures import ARCHITECTURES, Architecture
from runtime.errors import ModelError
from runtime.rope_config import PositiveFloat, PositiveInt

T = TypeVar("T")
StructT = TypeVar("StructT", bound=msgspec.Struct)
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class _Preamble(msgspec.Struct):
    """What decides whether a config.json is read at all."""

    architectures: list[str] | None = None
    model_type: str = ""
    auto_map: Any = None
    quantization_config: Any = None


class ConfigFile(msgspec.Struct, kw_only=True):
    """The keys of config.json that are read. An absent one means what it means to most architectures."""

    model_type: str = ""
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
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
    dtype: str | None = None
    torch_dtype: str | None = None
    bos_token_id: Count | None = None
    eos_token_id: Count | list[Count] | None = None


class OptionalKeys(msgspec.Struct, kw_only=True):
    """What only some architectures know. Read where the table names the key."""

    rotary_fraction: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    window_rope_theta: PositiveFloat | None = None
    sliding_window_pattern: PositiveInt = 2
    attention_scale: PositiveFloat | None = None
    attention_scale_dim: PositiveFloat | None = None  # the scale is one over its square root
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


class GenerationFile(msgspec.Struct):
    """The keys of generation_config.json that are read."""

    bos_token_id: Count | None = None
    eos_token_id: Count | list[Count] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    repetition_penalty: PositiveFloat | None = None


class ConfigKeys(msgspec.Struct, frozen=True):
    """A config.json in our words, and the row of the table that says how it was read."""

    architecture: str
    row: Architecture
    file: ConfigFile
    optional: OptionalKeys


def read_config(path: Path) -> ConfigKeys:
    """What a checkpoint's config.json says.

    Raises ModelError for an architecture that needs its own code, is quantised or is in no row of the table.
    """
    preamble = _read(path, _Preamble)
    name = _architecture(preamble)
    raw = _read(path, dict[str, Any])
    row = ARCHITECTURES[name]
    return ConfigKeys(
        name, row, _in_our_words(raw, row, ConfigFile), _in_our_words(raw, row, OptionalKeys, only_named=True)
    )


def _architecture(preamble: _Preamble) -> str:
    supported = ", ".join(ARCHITECTURES)
    names = preamble.architectures or []
    served = [name for name in names if name in ARCHITECTURES]
    if preamble.auto_map is not None and not (served and ARCHITECTURES[served[0]].ships_code):
        raise ModelError(
            "config.json has auto_map: the model comes with its own code, which is never run. "
            f"Supported architectures: {supported}."
        )
    if preamble.quantization_config is not None:
        raise ModelError(
            "config.json has quantization_config: quantised checkpoints are not supported. "
            "Use the checkpoint in bfloat16, float16 or float32."
        )
    if served:
        return served[0]
    found = ", ".join(names) or f"none (model_type {preamble.model_type!r})"
    raise ModelError(f"Architecture {found} is not supported. Supported architectures: {supported}.")


def _in_our_words(
    raw: Mapping[str, Any], row: Architecture, kind: type[StructT], *, only_named: bool = False
) -> StructT:
    """The fields of `kind` by the names and defaults that the architecture has for them."""
    spelled = {
        field.name: _spellings(row, field.name)
        for field in msgspec.structs.fields(kind)
        if not only_named or field.name in row.keys
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


def read_generation_config(path: Path) -> GenerationFile:
    return _read(path, GenerationFile)


def _read(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
