"""Timing of work on a device, by events on a GPU and by the clock on a CPU; and the device's peak rates."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from model_worker.device.base import Device

NUM_REPLAYS = 5
MAX_QUEUED = 200
"""Maximum number of copies in a `Backlog`. The device's queue has room for about a thousand launches,
including those that are timed.
"""


def mark(device: torch.device) -> Any:
    """Return a mark at the present point of the current stream."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def ms_between(first: Any, second: Any) -> float:
    """Return the milliseconds between two marks that the device has passed."""
    return 1e3 * (second - first) if isinstance(first, float) else float(first.elapsed_time(second))


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_ms(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median time of one `work`, after two runs that do not count."""
    for _ in range(2):
        work()
    marks = [mark(device)]
    for _ in range(repeats):
        work()
        marks.append(mark(device))
    wait(device)
    return statistics.median(ms_between(*pair) for pair in pairwise(marks))


def recorded_ms(work: Callable[[], object], device: Device, repeats: int) -> float:
    """Return the time of one `work` among `repeats` that are recorded one after the other. This is the
    device's time even if the host takes longer to launch. Not recorded on a CPU.
    """
    if device.name == "cpu":
        return median_ms(work, device.torch_device, repeats)

    def several() -> None:
        for _ in range(repeats):
            work()

    def measured() -> float:
        return median_ms(device.capture(several).replay, device.torch_device, NUM_REPLAYS) / repeats

    wait(device.torch_device)  # for memory that `work` reads
    # The default stream cannot be recorded.
    return device.forward_stream.launch(measured).wait()


class Backlog:
    """Keeps the device busy while the host queues the work that is to be timed."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        """num_bytes: bytes of the tensor that is copied, and of its copy."""
        self._source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._target = torch.empty_like(self._source)
        self._copy_ms = median_ms(self._copy, device, NUM_REPLAYS)

    def queue(self, ms: float) -> None:
        """Give the device about `ms` milliseconds of work, unless that needs too many launches."""
        if self._source.is_cuda:  # a CPU has no queue
            for _ in range(min(MAX_QUEUED, math.ceil(ms / self._copy_ms))):
                self._copy()

    def _copy(self) -> None:
        self._target.copy_(self._source)


def copy_rate(device: torch.device, num_bytes: int, repeats: int) -> float:
    """Return the bytes per second that a copy within the device moves, read and written together. The bytes
    are random, because a GPU can compress equal ones.
    """
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / (median_ms(lambda: target.copy_(source), device, repeats) * 1e-3)


def matrix_rate(device: torch.device, size: int, dtype: torch.dtype, repeats: int) -> float:
    """Return the operations per second of a square matrix product."""
    a = torch.randn(size, size, device=device, dtype=dtype)
    b = torch.randn(size, size, device=device, dtype=dtype)
    return 2 * size**3 / (median_ms(lambda: a @ b, device, repeats) * 1e-3)
