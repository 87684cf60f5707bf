"""What of the device's memory the KV cache may have, and its allocation."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence

import torch

from model_worker.device.base import Device
from model_worker.kv_pool import KVLayout, MHATokenToKVPool
from model_worker.model_runner import ModelRunner
from runtime.errors import ConfigError

logger = logging.getLogger(__name__)

# KV cache of a runner that only shows what it takes besides.
TRIAL_TOKENS = 16


def make_kv_pool(
    num_pages: int, page_size: int, layout: KVLayout, dtype: torch.dtype, device: Device
) -> MHATokenToKVPool:
    """Raises ConfigError when the device does not have the memory."""
    try:
        return MHATokenToKVPool(
            num_pages,
            page_size,
            layout.num_layers,
            layout.num_kv_heads,
            layout.head_dim,
            dtype,
            device.torch_device,
        )
    except torch.OutOfMemoryError as error:
        size = (num_pages + 1) * page_size * layout.bytes_per_token(dtype)
        raise ConfigError(
            f"out of memory while allocating a KV cache of {size / (1 << 30):.2f} GiB: lower "
            "--mem-fraction-static or --max-total-tokens; another program may have taken memory meanwhile"
        ) from error


def free_beside_graphs(
    make_trial: Callable[[Sequence[int]], ModelRunner], sizes: Sequence[int], device: Device
) -> int:
    """Free bytes, less what a runner takes that records graphs of `sizes` (ascending): its tables and graphs.

    Measured, because nothing else knows what a graph keeps: the two largest are recorded over a KV cache of
    a few pages, and each other one is counted like the second. make_trial(sizes) -> such a runner.
    """
    free = device.free_bytes()
    if not sizes:
        return free
    left = []
    for count in range(1, min(2, len(sizes)) + 1):
        trial = make_trial(sizes[-count:])
        trial.warm_up()
        left.append(device.free_bytes())
        del trial
        gc.collect()  # tables and recordings know each other
    each = max(0, left[0] - left[-1])
    remaining = left[-1] - each * max(0, len(sizes) - len(left))
    logger.info(
        "CUDA graphs of %d sizes and the rows' tables take %.2f GiB",
        len(sizes),
        (free - remaining) / (1 << 30),
    )
    return max(0, remaining)
