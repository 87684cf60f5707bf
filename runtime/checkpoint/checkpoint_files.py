"""Checks of checkpoint files: that the directory can be opened, and that a file is not a git-lfs pointer.
Knows no format.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from runtime.base.errors import ModelError

LFS_START = b"version https://git-lfs.github.com/spec/"
HUB_HOSTS = ("huggingface.co", "hf.co", "www.huggingface.co")
WEIGHTS_OF_OTHERS = {
    ".bin": "PyTorch's pickle files (.bin)",
    ".pt": "PyTorch's pickle files (.pt)",
    ".pth": "PyTorch's pickle files (.pth)",
    ".gguf": "GGUF files",
    ".h5": "TensorFlow's files (.h5)",
    ".msgpack": "Flax's files (.msgpack)",
    ".onnx": "ONNX files",
}
"""Kinds of weight files that only other programs read, by the end of the file name."""


def refuse_lfs_pointer(path: Path, start: bytes) -> None:
    """Raise ModelError if a file that starts with these bytes is a git-lfs pointer."""
    if start.startswith(LFS_START):
        raise ModelError(
            f"{path} is a git-lfs pointer, not the file itself: run 'git lfs pull' in {path.parent}, or "
            "download the model again with 'hf download'."
        )


def refuse_unless_directory(path: Path) -> None:
    """Raise ModelError, saying what to do, if `path` is not a directory that this user may read."""
    try:
        path.stat()
    except FileNotFoundError:
        if path.parts and path.parts[0] in ("http:", "https:"):
            host, *name = path.parts[1:] or ("",)
            is_hub = host in HUB_HOSTS and len(name) >= 2
            known = f" --model {name[0]}/{name[1]} is that model." if is_hub else ""
            raise ModelError(
                f"Model {path.parts[0]}//{'/'.join(path.parts[1:])} is a URL: pass the path of a local "
                f"checkpoint, or owner/name of a model on the Hugging Face Hub.{known}"
            ) from None
        raise ModelError(
            f"Model directory {path} does not exist. Pass the path of a local checkpoint, or owner/name of a "
            "model on the Hugging Face Hub."
        ) from None
    except OSError as error:
        raise ModelError(f"Model directory {path} cannot be opened: {error.strerror}.") from None
    if not path.is_dir():
        kind = WEIGHTS_OF_OTHERS.get(path.suffix)
        not_read = f"; {kind} are not read, a directory with safetensors is" if kind else ""
        raise ModelError(f"Model {path} is a file: pass the directory of the checkpoint{not_read}.")
    try:
        os.listdir(path)
        with suppress(FileNotFoundError):
            (path / "config.json").stat()
    except OSError as error:
        raise ModelError(f"Model directory {path} cannot be opened: {error.strerror}.") from None


def no_config(path: Path) -> ModelError:
    """Return the error for a directory without a config.json; it says what is in the directory instead."""
    names = sorted(os.listdir(path))
    said = f"{path} has no config.json, so it is not a checkpoint directory"
    if not names:
        return ModelError(f"{said}: it is empty.")
    if (path / "adapter_config.json").is_file():
        return ModelError(f"{said}: it holds an adapter (LoRA). Pass the model itself.")
    if (path / "snapshots").is_dir():
        return ModelError(f"{said}: it is a model of the Hub's cache. Pass one of {path}/snapshots.")
    inside = [name for name in names if (path / name / "config.json").is_file()]
    if len(inside) == 1:
        return ModelError(f"{said}. {path / inside[0]} has one: pass that.")
    kind = kind_of_others(path)
    return ModelError(f"{said}{f': it holds {kind}, which are not read' if kind else ''}.")


def kind_of_others(path: Path) -> str:
    """Return the kind of weights in a directory that only other programs read; empty if there are none."""
    found = {Path(name).suffix for name in os.listdir(path)}
    return next((kind for suffix, kind in WEIGHTS_OF_OTHERS.items() if suffix in found), "")
