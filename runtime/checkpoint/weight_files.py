"""Weight files of a checkpoint: their list, and a check that each is complete according to its header. Reads
indexes and headers, which are JSON; reads no tensor and needs no tensor library.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec

from runtime.base.errors import ModelError
from runtime.checkpoint.checkpoint_files import kind_of_others, refuse_lfs_pointer

INDEX_FILE = "model.safetensors.index.json"
WHOLE_FILE = "model.safetensors"
LENGTH_BYTES = 8
"""Size of the field at the start of a safetensors file that has the length of its header, little endian."""
MAX_HEADER_BYTES = 100_000_000
"""Longest header, as in the safetensors library."""
_NAMES_SHOWN = 8


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


METADATA = "__metadata__"
"""Key of a header that is not a tensor."""


class StoredTensor(msgspec.Struct):
    """Header entry of a tensor, with its position in the file behind the header."""

    data_offsets: tuple[int, int] = (0, 0)
    dtype: str = ""
    shape: list[Annotated[int, msgspec.Meta(ge=0)]] = []

    @property
    def num_bytes(self) -> int:
        return self.data_offsets[1] - self.data_offsets[0]


def weight_files(model_path: Path) -> list[Path]:
    """Return the checkpoint's weight files: those its index names, or model.safetensors, or else every
    *.safetensors in the directory. Raises ModelError if there are none, or if files that the index names are
    missing.
    """
    index, whole = model_path / INDEX_FILE, model_path / WHOLE_FILE
    if index.is_file():
        names = sorted(set(_read_index(index).values()))
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise ModelError(f"{index} names files outside the model directory: {first_of(outside)}.")
        missing = [name for name in names if not (model_path / name).is_file()]
        # Left from an earlier save: saving one file, transformers removes the shards, but not the index.
        is_old = len(missing) == len(names) and whole.is_file()
        if missing and not is_old:
            raise ModelError(
                f"{model_path} lacks files that its index names: {first_of(missing)}. Download the rest of "
                "the checkpoint."
            )
        if names and not is_old:
            return [model_path / name for name in names]
    # As transformers does: other files beside it (averages of weights, an adapter) are not part of the model.
    if whole.is_file():
        return [whole]
    # Some checkpoints contain the same weights again as "consolidated", in their authors' own layout.
    files = [path for path in sorted(model_path.glob("*.safetensors")) if "consolidated" not in path.name]
    if not files:
        kind = kind_of_others(model_path)
        found = f", only {kind}" if kind else ""
        raise ModelError(
            f"{model_path} has no *.safetensors file{found}. Other formats are not read: convert the "
            "checkpoint, or use the load format 'dummy' for random weights."
        )
    return files


def check_weight_files(model_path: Path) -> None:
    """Raise ModelError, which names the file, for weights that cannot load: missing, truncated, of another
    format, or a git-lfs pointer.
    """
    for path in weight_files(model_path):
        try:
            read_header(path)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}.") from None


def header_bytes(path: Path) -> int:
    """Return the size of a safetensors file's header, as the file says it. Raises OSError."""
    with path.open("rb") as file:
        return int.from_bytes(file.read(LENGTH_BYTES), "little")


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file. Raises ModelError if it is truncated or not such a file, and
    OSError.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(LENGTH_BYTES)
        refuse_lfs_pointer(path, start + file.read(LENGTH_BYTES * 8))
        length = int.from_bytes(start, "little")
        if size < LENGTH_BYTES or (length <= MAX_HEADER_BYTES and size < LENGTH_BYTES + length):
            raise ModelError(
                f"{path} is cut short: it has {size} bytes, and its header alone more. Download the "
                "checkpoint again."
            )
        if length > MAX_HEADER_BYTES:
            raise ModelError(f"{path} is no safetensors file. Download the checkpoint again.")
        file.seek(LENGTH_BYTES)
        header = file.read(length)
    try:
        tensors = msgspec.json.decode(header, type=dict[str, StoredTensor])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(
            f"{path} has a header that cannot be read: {error}. Download the checkpoint again."
        ) from None
    whole = LENGTH_BYTES + length + max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
    if size != whole:
        what = "is cut short" if size < whole else "is longer than its header says"
        raise ModelError(f"{path} {what}: it has {size} of {whole} bytes. Download the checkpoint again.")
    tensors.pop(METADATA, None)
    return tensors


def _read_index(index: Path) -> dict[str, str]:
    try:
        data = index.read_bytes()
        refuse_lfs_pointer(index, data)
        return msgspec.json.decode(data, type=_Index).weight_map
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{index} cannot be read: {error}") from error


def first_of(names: list[str]) -> str:
    """Return the first names for an error message, and how many more there are: a wrong checkpoint may have
    thousands.
    """
    rest = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
