"""Pooling: how an embedding model combines the hidden states of a text into one vector, from its
sentence-transformers files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from runtime.base.errors import ModelError

PoolingKind = Literal["last", "mean"]

T = TypeVar("T")

MODULES_FILE = "modules.json"
# Modules that modules.json may have. Others have weights of their own or change the vector in another way.
TRANSFORMER, POOLING, NORMALIZE = "Transformer", "Pooling", "Normalize"


class Pooling(msgspec.Struct, frozen=True):
    """Pooling of the final hidden states of a text's tokens."""

    kind: PoolingKind
    normalize: bool = True
    """True to divide the vector by its Euclidean length."""


class _Module(msgspec.Struct):
    type: str
    path: str = ""


class _PoolingFile(msgspec.Struct):
    pooling_mode_cls_token: bool = False
    pooling_mode_mean_tokens: bool = False
    pooling_mode_max_tokens: bool = False
    pooling_mode_mean_sqrt_len_tokens: bool = False
    pooling_mode_weightedmean_tokens: bool = False
    pooling_mode_lasttoken: bool = False
    include_prompt: bool = True


def read_pooling(model_path: Path, chosen: Literal["auto", "last", "mean"] = "auto") -> Pooling:
    """Return the pooling that modules.json and its pooling module specify. A model without these files pools
    its last token and normalizes. `chosen` other than "auto" overrides the kind. Raises ModelError, which
    names the file, for kinds other than last and mean.
    """
    path = model_path / MODULES_FILE
    if not path.is_file():
        return Pooling("last" if chosen == "auto" else chosen)
    modules = _modules(path)
    kinds = [module.type.rsplit(".", 1)[-1] for module in modules]
    foreign = [kind for kind in kinds if kind not in (TRANSFORMER, POOLING, NORMALIZE)]
    if foreign:
        raise ModelError(
            f"{path} has a module {foreign[0]!r}: only Transformer, Pooling and Normalize are served"
        )
    normalize = NORMALIZE in kinds
    if chosen != "auto":
        return Pooling(chosen, normalize)
    file = pooling_file(model_path)
    if file is None:
        raise ModelError(f"{path} names no Pooling module; say which with --pooling last or --pooling mean")
    return Pooling(_kind(file), normalize)


def pooling_file(model_path: Path) -> Path | None:
    """Return the config of the pooling module; None if modules.json is missing or names none. Raises
    ModelError.
    """
    path = model_path / MODULES_FILE
    modules = _modules(path) if path.is_file() else []
    pooling = next((module for module in modules if module.type.endswith(POOLING)), None)
    return None if pooling is None else model_path / pooling.path / "config.json"


def _modules(path: Path) -> list[_Module]:
    return _read(path, list[_Module])


def _kind(path: Path) -> PoolingKind:
    said = _read(path, _PoolingFile)
    modes = [
        name
        for name in _PoolingFile.__struct_fields__
        if name.startswith("pooling_mode_") and getattr(said, name)
    ]
    if not said.include_prompt:
        raise ModelError(f"{path}: include_prompt false, which leaves the instruction out, is not served")
    match modes:
        case ["pooling_mode_lasttoken"]:
            return "last"
        case ["pooling_mode_mean_tokens"]:
            return "mean"
    raise ModelError(
        f"{path} asks for {', '.join(modes) or 'no pooling mode'}: served are lasttoken and mean_tokens"
    )


def _read(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
