"""quantization_config of a config.json: how a checkpoint's weights are quantized. Opens no weights."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from runtime.base.errors import ModelError

QuantDType = Literal["float8_e4m3fn", "int8"]

_HINT = (
    "Read are quant_method fp8, compressed-tensors and modelopt, with float8 or int8 weights, and fixed "
    "float8 scales of keys and values, one a layer. Use such a checkpoint, or one in bfloat16, float16 or "
    "float32, of which --quantization int8 makes int8 on a CPU."
)
_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")
_STRATEGIES = ("tensor", "channel", "block")
_STATIC_KV_CACHE = ("static", "FP8")
"""Values by which AutoFP8 and older ModelOpt say that keys and values have one fixed scale each."""
_MODELOPT = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")


class CheckpointQuantization(msgspec.Struct, frozen=True):
    """Quantization to 8-bit weights with scales. The files themselves show which layers are quantized, and
    which have scales of keys and values. block: rows and columns of a weight that share a scale; None: one
    scale for each tensor or each row.
    """

    dtype: QuantDType
    block: tuple[int, int] | None = None


class _Args(msgspec.Struct):
    num_bits: int = 8
    type: str = "int"
    strategy: str | None = None
    symmetric: bool = True
    dynamic: bool | str = False
    block_structure: list[int] | None = None


class _Group(msgspec.Struct):
    targets: list[str] = []
    weights: _Args | None = None
    input_activations: _Args | None = None


class _QuantizationConfig(msgspec.Struct):
    quant_method: str = ""
    format: str | None = None
    quant_algo: str | None = None
    fmt: str = "e4m3"
    weight_block_size: list[int] | None = None
    config_groups: dict[str, _Group] = {}
    kv_cache_scheme: _Args | str | None = None


def read_quantization(raw: Any) -> CheckpointQuantization | None:
    """Return the quantization that `quantization_config` (decoded JSON) describes; None if it does not
    concern weights. Raises ModelError, which names the method or field, for anything that is not supported.
    """
    if raw is None:
        return None
    try:
        config = msgspec.convert(raw, _QuantizationConfig)
    except msgspec.ValidationError as error:
        raise ModelError(f"config.json: quantization_config cannot be read: {error}") from error
    _check_kv_cache(config.kv_cache_scheme)
    match config.quant_method:
        case "fp8":
            if config.fmt not in ("e4m3", "float8_e4m3fn"):
                raise _unsupported(f"fmt {config.fmt!r}")
            return CheckpointQuantization("float8_e4m3fn", _block(config.weight_block_size))
        case "compressed-tensors":
            return _compressed_tensors(config)
        case "modelopt":
            return _modelopt(config)
    raise _unsupported(f"quant_method {config.quant_method!r}")


def _check_kv_cache(scheme: _Args | str | None) -> None:
    """Raise ModelError unless the KV cache is float8 with one fixed scale for a layer's keys and one for its
    values.
    """
    if scheme in (None, *_STATIC_KV_CACHE):
        return
    if isinstance(scheme, str):
        raise _unsupported(f"kv_cache_scheme {scheme!r}")
    if scheme.num_bits != 8 or scheme.type != "float":
        raise _unsupported(f"kv_cache_scheme of {scheme.num_bits} bits, type {scheme.type!r}")
    if scheme.strategy not in (None, "tensor"):
        raise _unsupported(f"kv_cache_scheme.strategy {scheme.strategy!r}")
    if scheme.dynamic is not False:
        raise _unsupported("kv_cache_scheme that is dynamic")
    if not scheme.symmetric:
        raise _unsupported("kv_cache_scheme that is not symmetric")


def _modelopt(config: _QuantizationConfig) -> CheckpointQuantization | None:
    if config.kv_cache_scheme is not None and config.quant_algo is None:
        return None  # keys and values alone
    if config.quant_algo not in _MODELOPT:
        raise _unsupported(f"quant_algo {config.quant_algo!r}")
    return CheckpointQuantization("float8_e4m3fn")


def _compressed_tensors(config: _QuantizationConfig) -> CheckpointQuantization | None:
    groups = config.config_groups
    if config.kv_cache_scheme is not None:
        groups = {name: group for name, group in groups.items() if not _is_of_attention(group)}
        if not groups:
            return None  # keys and values alone
    if config.format not in _FORMATS:
        raise _unsupported(f"format {config.format!r}")
    found = {_group(name, group) for name, group in groups.items()}
    if len(found) != 1:
        raise _unsupported(f"config_groups with {len(found)} kinds of weights")
    return found.pop()


def _is_of_attention(group: _Group) -> bool:
    """Return True for a group of only queries, keys and values, about which kv_cache_scheme says the same."""
    return group.weights is None and all(target.endswith("Attention") for target in group.targets)


def _group(name: str, group: _Group) -> CheckpointQuantization:
    where = f"config_groups.{name}"
    weights, inputs = group.weights, group.input_activations
    if weights is None:
        raise _unsupported(f"{where} without weights")
    if weights.num_bits != 8 or weights.type not in ("float", "int"):
        raise _unsupported(f"{where}.weights of {weights.num_bits} bits, type {weights.type!r}")
    if not weights.symmetric:
        raise _unsupported(f"{where}.weights that are not symmetric")
    if weights.strategy not in _STRATEGIES:
        raise _unsupported(f"{where}.weights.strategy {weights.strategy!r}")
    is_int = weights.type == "int"
    if is_int and (inputs is None or inputs.num_bits != 8 or inputs.dynamic is not True):
        raise _unsupported(f"{where}.input_activations that are not 8 bits and dynamic, of int8 weights")
    block = _block(weights.block_structure) if weights.strategy == "block" else None
    return CheckpointQuantization("int8" if is_int else "float8_e4m3fn", block)


def _block(sizes: list[int] | None) -> tuple[int, int] | None:
    if sizes is None:
        return None
    if len(sizes) != 2 or min(sizes) < 1:
        raise _unsupported(f"blocks of {sizes}")
    return sizes[0], sizes[1]


def _unsupported(what: str) -> ModelError:
    return ModelError(f"config.json: quantization_config: {what} is not supported. {_HINT}")
