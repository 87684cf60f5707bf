"""CheckpointConfig: properties of a checkpoint that every process needs, whichever implementation computes
the model.

Reads only config.json, generation_config.json and ModelOpt's hf_quant_config.json. Opens no weights; imports
neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast, get_args

import msgspec

from runtime.base.errors import ModelError
from runtime.checkpoint.checkpoint_files import no_config, refuse_lfs_pointer, refuse_unless_directory
from runtime.checkpoint.quantization import CheckpointQuantization, read_quantization
from runtime.checkpoint.rope_config import PositiveFloat, PositiveInt
from runtime.checkpoint.text_keys import text_keys
from runtime.sampling.table import PARAMETERS

T = TypeVar("T")
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
DType = Literal["float32", "bfloat16", "float16"]

# How checkpoints spell the longest sequence in tokens, the usual spelling first.
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")


class SamplingDefaults(msgspec.Struct, frozen=True):
    """Sampling parameters that generation_config.json recommends; None where it has none."""

    # Written by python -m runtime.sampling.generate, defaults: begin.
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    # Written by python -m runtime.sampling.generate, defaults: end.


class GenerationFile(msgspec.Struct):
    """Keys of generation_config.json that are read."""

    bos_token_id: Count | None = None
    eos_token_id: Count | list[Count] | None = None
    # Written by python -m runtime.sampling.generate, file: begin.
    max_new_tokens: PositiveInt | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] | None = None
    repetition_penalty: PositiveFloat | None = None
    # Written by python -m runtime.sampling.generate, file: end.


class _ModelOptFile(msgspec.Struct):
    """Keys of hf_quant_config.json that are read."""

    class Quantization(msgspec.Struct):
        quant_algo: str | None = None
        kv_cache_quant_algo: str | None = None

    quantization: Quantization


class _SharedKeys(msgspec.Struct):
    """Keys of config.json that mean the same in every architecture."""

    model_type: str = ""
    architectures: list[str] | None = None
    vocab_size: PositiveInt | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    bos_token_id: Count | None = None
    eos_token_id: Count | list[Count] | None = None


SHARED_KEYS = _SharedKeys.__struct_fields__


class CheckpointConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about one checkpoint. max_position_embeddings is the context in tokens."""

    model_type: str
    architecture: str
    vocab_size: int
    max_position_embeddings: int
    dtype: DType
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    sampling: SamplingDefaults
    quantization: CheckpointQuantization | None = None
    has_head: bool = True
    """False for a decoder that ends with its final norm, as embedding models are published."""

    @staticmethod
    def read(path: Path, overrides: str = "") -> CheckpointConfig:
        """Read the checkpoint in the directory `path`. overrides: a JSON object over its config.json.

        Raises: ModelError, saying what to do, when the directory or its config.json is missing or unreadable
        or does not say what is needed.
        """
        raw = read_decoder_keys(config_file(path), overrides)
        keys = convert_keys(config_file(path), raw, _SharedKeys)
        generation = GenerationFile()
        if (path / "generation_config.json").is_file():
            generation = read_json(path / "generation_config.json", GenerationFile)
        if keys.vocab_size is None:
            raise ModelError("config.json cannot be read: missing required field `vocab_size`.")
        return CheckpointConfig(
            model_type=keys.model_type,
            architecture=(keys.architectures or [""])[0],
            vocab_size=keys.vocab_size,
            max_position_embeddings=_context_length(raw),
            dtype=_dtype(keys.dtype or keys.torch_dtype),
            quantization=read_quantization(raw.get("quantization_config") or _of_modelopt(path)),
            bos_token_id=keys.bos_token_id if generation.bos_token_id is None else generation.bos_token_id,
            eos_token_ids=_eos_token_ids(generation.eos_token_id, keys.eos_token_id),
            sampling=SamplingDefaults(
                **{p.name: getattr(generation, p.recommended[0]) for p in PARAMETERS if p.recommended[0]}
            ),
        )


def config_file(path: Path) -> Path:
    """Return the config.json of the checkpoint directory `path`. Raises ModelError if there is none."""
    refuse_unless_directory(path)
    if not (path / "config.json").is_file():
        raise no_config(path)
    return path / "config.json"


def read_json(path: Path, kind: type[T]) -> T:
    """Decode one of a checkpoint's JSON files. Raises ModelError."""
    try:
        data = path.read_bytes()
        refuse_lfs_pointer(path, data)
        return msgspec.json.decode(data, type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def read_whole_keys(path: Path, overrides: str = "") -> dict[str, Any]:
    """Return the keys of config.json, overridden by those of a JSON object."""
    return read_json(path, dict[str, Any]) | _object(overrides)


def read_decoder_keys(path: Path, overrides: str = "") -> dict[str, Any]:
    """Return the keys of the text decoder, also from a multimodal config.json. Overrides replace the
    decoder's keys, except for the few that a multimodal file has outside text_config. Raises ModelError.
    """
    return text_keys(read_whole_keys(path, overrides)) | _object(overrides)


def _object(overrides: str) -> dict[str, Any]:
    return msgspec.json.decode(overrides, type=dict[str, Any]) if overrides else {}


def convert_keys(path: Path, raw: Mapping[str, Any], kind: type[T]) -> T:
    """Convert keys of the config.json in `path` to a struct. Raises ModelError."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def _of_modelopt(path: Path) -> dict[str, Any] | None:
    """Return the quantization_config of a checkpoint that has it in a separate file, as older ones of
    ModelOpt do.
    """
    if not (path / "hf_quant_config.json").is_file():
        return None
    file = read_json(path / "hf_quant_config.json", _ModelOptFile).quantization
    return {
        "quant_method": "modelopt",
        "quant_algo": file.quant_algo,
        "kv_cache_scheme": file.kv_cache_quant_algo,
    }


def _context_length(raw: dict[str, Any]) -> int:
    for key in CONTEXT_KEYS:
        if raw.get(key) is not None:
            try:
                return msgspec.convert(raw[key], PositiveInt)
            except msgspec.ValidationError as error:
                raise ModelError(f"config.json cannot be read: {error} - at `$.{key}`") from error
    raise ModelError(
        "config.json cannot be read: it has no `max_position_embeddings`, and no "
        f"{', '.join(CONTEXT_KEYS[1:])} either, so the longest sequence is not known. Models that need none "
        "(state-space layers, ALiBi) are not served: docs/models.md."
    )


def _dtype(name: str | None) -> DType:
    """Return the checkpoint's dtype: float32 if the file names none."""
    bare = (name or "float32").removeprefix("torch.")
    if bare not in get_args(DType):
        known = ", ".join(get_args(DType))
        raise ModelError(f"config.json: dtype {name!r} is not supported. Supported: {known}.")
    return cast(DType, bare)


def _eos_token_ids(*sources: int | list[int] | None) -> tuple[int, ...]:
    """Return the ids that end a sequence, from all sources in order, without duplicates."""
    ids: dict[int, None] = {}
    for source in sources:
        if source is not None:
            ids.update(dict.fromkeys([source] if isinstance(source, int) else source))
    return tuple(ids)
