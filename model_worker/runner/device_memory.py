"""Size and allocation of the KV cache, from the device's free memory."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence

import torch

from model_worker.device.base import Device
from model_worker.device.out_of_memory import when_out_of_memory
from model_worker.memory.kv_pool import KVLayout, MHATokenToKVPool
from model_worker.runner.model_runner import ModelRunner
from runtime.base.errors import ConfigError

logger = logging.getLogger(__name__)

# Tokens of the KV cache of a trial runner, which only measures the other memory.
TRIAL_TOKENS = 16
# The host's memory belongs to other programs too. Arbitrary.
MAX_CPU_KV_BYTES = 8 << 30
CPU_KV_SHARE = 8
"""Divisor of the host's memory: by default the KV cache takes at most 1/CPU_KV_SHARE of it."""
STEP_REMEDY = (
    "lower --chunked-prefill-size or --max-running-requests, take a narrower --dtype or a larger --tp-size, "
    "or end what else uses the device"
)


def make_kv_pool(
    num_pages: int, page_size: int, layout: KVLayout, dtype: torch.dtype, device: Device
) -> MHATokenToKVPool:
    """Allocate the KV cache. Raises ConfigError if the device does not have the memory."""
    size = (num_pages + 1) * page_size * layout.bytes_per_token(dtype)
    with when_out_of_memory(
        f"allocating a KV cache of {size / (1 << 30):.2f} GiB",
        "lower --mem-fraction-static or --max-total-tokens; another program may have taken memory meanwhile",
    ):
        return MHATokenToKVPool(
            num_pages,
            page_size,
            layout.num_layers,
            layout.num_kv_heads,
            layout.head_dim,
            dtype,
            device.torch_device,
            layout.first_layer,
        )


def free_beside_steps(
    make_trial: Callable[[Sequence[int]], ModelRunner], sizes: Sequence[int], device: Device, max_tokens: int
) -> int:
    """Return the free bytes; on a GPU without what a runner takes besides its KV cache: its tables, its
    largest step, and graphs of `sizes` (ascending).

    This is measured, because it cannot be computed, with a KV cache of a few pages. The two largest sizes are
    recorded, and each other one is counted like the second. make_trial(sizes) returns a runner that records
    these sizes and computes steps of up to max_tokens. Raises ConfigError when they do not fit.
    """
    free, left, step = device.free_bytes(), list[int](), 0
    if not device.has_own_memory:
        return free
    doing = f"computing a step of up to {max_tokens} tokens"
    for count in range(min(1, len(sizes)), min(2, len(sizes)) + 1):
        with when_out_of_memory(doing, STEP_REMEDY):
            trial = make_trial(sizes[len(sizes) - count :])
            trial.warm_up()
        beside_cache = device.free_bytes(cached=False)
        left.append(device.free_bytes())
        step = max(0, left[-1] - beside_cache)  # memory that the allocator kept
        del trial
        gc.collect()  # tables and recordings refer to each other
    each = max(0, left[0] - left[-1])
    remaining = left[-1] - each * max(0, len(sizes) - len(left)) - step
    logger.info(
        "beside the KV cache: %.2f GiB for the largest step, %.2f GiB for tables and CUDA graphs of %d sizes",
        step / (1 << 30),
        (free - remaining - step) / (1 << 30),
        len(sizes),
    )
    return max(0, remaining)


def size_kv_pool(
    *,
    free_bytes: int,
    fraction: float,
    bytes_per_token: int,
    page_size: int,
    max_total_tokens: int,
    host_bytes: int | None = None,
    num_sharing: int = 1,
) -> int:
    """Return the number of pages of the KV pool without the dummy page: the smaller of what `fraction` of the
    free memory and `max_total_tokens` allow. num_sharing: number of pools that divide the memory.

    max_total_tokens is rounded up to pages, so that a sequence of that many tokens fits. 0 sets no limit,
    except that on a CPU, with `host_bytes` of memory, MAX_CPU_KV_BYTES and CPU_KV_SHARE are then limits.
    Raises ConfigError if not even a prompt of one token and its answer fit.
    """
    budget = int(free_bytes * fraction)
    if host_bytes is not None and not max_total_tokens:
        budget = min(budget, MAX_CPU_KV_BYTES, host_bytes // CPU_KV_SHARE)
    budget //= num_sharing
    num_pages = budget // (bytes_per_token * page_size) - 1
    if max_total_tokens:
        num_pages = min(num_pages, -(-max_total_tokens // page_size))
    if num_pages * page_size < 2:
        raise ConfigError(
            f"no room for a KV cache: mem_fraction_static {fraction:g} of {free_bytes >> 20} MiB free, "
            f"max_total_tokens {max_total_tokens or 'not set'}, page_size {page_size}, "
            f"{bytes_per_token} bytes a token: raise --mem-fraction-static or --max-total-tokens, lower "
            "--chunked-prefill-size, --max-running-requests or --cuda-graph-max-bs, take a narrower --dtype, "
            "or end what else uses the device"
        )
    return num_pages
