"""Choice of the kind of group that the ranks of a launch form."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from model_worker.distributed.group import SOLO, RankGroup
from model_worker.distributed.shared_memory import SharedMemoryGroup
from model_worker.distributed.torch_group import TorchGroup, meeting_in
from model_worker.kernels.native.build import BuildError
from model_worker.kernels.native.library import DTYPES, load_kernels
from runtime.base.environment import kernel_cache_dir

logger = logging.getLogger(__name__)


def join_group(
    folder: Path,
    rank: int,
    size: int,
    device: torch.device,
    *,
    dtype: torch.dtype | None = None,
    join_timeout_s: float,
    on_wait: Callable[[], None],
) -> RankGroup:
    """Join the other ranks, which use the same folder. dtype: the model's dtype, if CPU kernels are compiled
    for it only. Raises GroupError.
    """
    if size == 1:
        return SOLO
    if device.type == "cuda":
        return TorchGroup(meeting_in(folder, size), rank, size, device, join_timeout_s=join_timeout_s)
    try:
        kernels = load_kernels(kernel_cache_dir(), dtype=dtype if dtype in DTYPES else None)
    except BuildError as error:
        logger.warning("ranks talk over gloo, which is slower than shared memory: %s", error)
        return TorchGroup(meeting_in(folder, size), rank, size, device, join_timeout_s=join_timeout_s)
    return SharedMemoryGroup(kernels, folder, rank, size, join_timeout_s=join_timeout_s, on_wait=on_wait)
