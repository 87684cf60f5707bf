"""A driver for Triton that compiles for Hopper and launches nothing: the host's part of a launch can be timed
without a GPU.

What is left out is the last part of a launch, in C: packing the arguments and the call of CUDA's driver.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

CAPABILITY = 90
NAME = "none: launches end before the C launcher"


class _Launcher:
    """Replaces the function that Triton compiles to launch one kernel."""

    def __init__(self, src: Any, metadata: Any) -> None:
        pass

    def __call__(self, *args: Any) -> None:
        pass


class _Utils:
    @staticmethod
    def get_device_properties(device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10}

    @staticmethod
    def load_binary(name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """Return module, function, registers, spills and threads."""
        return 1, 1, 0, 0, 1024

    @staticmethod
    def unload_module(module: int) -> None:
        pass


class FakeDriver:
    launcher_cls = _Launcher
    utils = _Utils

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind

    def is_active(self) -> bool:
        return True


@contextmanager
def fake_driver() -> Iterator[None]:
    """Context manager in which Triton's kernels take CPU tensors and leave them unchanged."""
    before = driver._active
    driver.set_active(FakeDriver())
    try:
        yield
    finally:
        driver._active = before
