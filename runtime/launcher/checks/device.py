"""Check that a GPU is there if one is asked for. Looks at device files, because asking the driver
takes long.
"""

from __future__ import annotations

import importlib.metadata
import os

from runtime.base.environment import visible_gpus
from runtime.base.errors import ConfigError

DRIVER_FILES: tuple[str, ...] = ("/dev/nvidiactl", "/dev/dxg")
"""Device files of NVIDIA's driver, in Linux and in WSL."""
CPU_BUILD = "+cpu"
"""Suffix of the version of a torch build without CUDA."""


def check_device(device: str) -> None:
    """Raise ConfigError if `device` is cuda and torch certainly finds no GPU."""
    if device != "cuda":
        return
    if not any(map(os.path.exists, DRIVER_FILES)):
        raise ConfigError(
            f"device: cuda was asked for, but this machine has no driver of an NVIDIA GPU (no "
            f"{DRIVER_FILES[0]}); try --device cpu"
        )
    if visible_gpus() == []:
        raise ConfigError("device: cuda was asked for, but CUDA_VISIBLE_DEVICES names no GPU; unset it")
    version = importlib.metadata.version("torch")
    if version.endswith(CPU_BUILD):
        raise ConfigError(
            f"device: cuda was asked for, but the torch that is installed ({version}) is a CPU build; "
            "install another, or try --device cpu"
        )
