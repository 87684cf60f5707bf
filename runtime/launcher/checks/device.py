"""The device: chosen if none is named, and checked to be there if a GPU is asked for. Looks at device files,
because asking the driver takes long.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
from pathlib import Path

from runtime.base.environment import visible_gpus
from runtime.base.errors import ConfigError

DRIVER_FILES: tuple[str, ...] = ("/dev/nvidiactl", "/dev/dxg")
"""Device files of NVIDIA's driver, in Linux and in WSL."""
CPU_BUILD = "+cpu"
"""Suffix of the version of a torch build without CUDA."""

logger = logging.getLogger(__name__)


def pick_device() -> str:
    """Return the device of a launch that names none: CUDA if there are GPUs and they are not hidden."""
    if not os.path.exists(DRIVER_FILES[0]):
        return "cpu"
    if visible_gpus() == []:
        logger.info("device: cpu, as CUDA_VISIBLE_DEVICES hides all GPUs")
        return "cpu"
    return "cuda"


def num_gpus() -> int:
    """Return the number of GPUs that this launch may use."""
    visible = visible_gpus()
    return len(list(Path("/dev").glob("nvidia[0-9]*"))) if visible is None else len(visible)


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
