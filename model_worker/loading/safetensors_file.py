"""Opening of a checkpoint's tensor file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runtime.base.errors import ModelError

Rename = Callable[[str], str | None]
"""Function from the name of a file's tensor to its name here; None for one that is skipped."""


class RenamedTensors:
    """A file of tensors under other names."""

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
    """Open the file with the safetensors library, with tensors renamed by `rename`, as a context manager.
    Raises ModelError if it cannot be read, now or later in the block.
    """
    # Imported here, because models of random weights are measured where the library may not be installed.
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file if rename is None else RenamedTensors(file, rename)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read: {error}. Download the checkpoint again.") from error
