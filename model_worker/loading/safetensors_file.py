"""Opening a checkpoint's file of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runtime.base.errors import ModelError


@contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """The file, as the safetensors library opens it. Raises ModelError where it cannot be read, now or later
    in the block.
    """
    # Here, because models of random weights are measured where the library need not be installed.
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read: {error}. Download the checkpoint again.") from error
