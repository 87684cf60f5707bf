"""no_waits(): work on a CUDA device for which the host must not wait."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_waits() -> Iterator[None]:
    """Make every wait for a CUDA device an error until the end, and none after it, whatever happens."""
    try:
        _set_sync_debug_mode("error")
        yield
    finally:
        _set_sync_debug_mode("default")


def _set_sync_debug_mode(mode: str) -> None:
    # Torch says once that the mode is a prototype, which pytest would raise when the mode is already set.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.cuda.set_sync_debug_mode(mode)
