"""Opening a checkpoint's file of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runtime.base.errors import ModelError

Rename = Callable[[str], str | None]
"""The name that a tensor of the files has here; None for one that is passed over."""


class RenamedTensors:
    """A file of tensors, by other names."""

    def __init__(self, file: Any, rename: Rename) -> None:
        self._file = file
        names = {name: rename(name) for name in list(file.keys())}
        self._names = {renamed: name for name, renamed in names.items() if renamed is not None}

    def keys(self) -> list[str]:
        return list(self._names)

    def get_slice(self, name: str) -> Any:
        return self._file.get_slice(self._names[name])

    def get_tensor(self, name: str) -> Any:
        return self._file.get_tensor(self._names[name])


@contextmanager
def open_safetensors(path: Path, rename: Rename | None = None) -> Iterator[Any]:
    """The file, as the safetensors library opens it; where there is `rename`, by those names. Raises
    ModelError where it cannot be read, now or later in the block.
    """
    # Here, because models of random weights are measured where the library need not be installed.
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file if rename is None else RenamedTensors(file, rename)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read: {error}. Download the checkpoint again.") from error
