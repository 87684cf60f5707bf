"""Fixed costs of a step: nodes of a graph, the copy of its block, collective operations of one rank."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor

from benchmarks.gpu.timing import median_ms, wait
from model_worker.device.base import Device
from model_worker.distributed.torch_group import TorchGroup, meeting_in
from model_worker.runner.recording.graph_runner import NUM_COLUMNS

JOIN_TIMEOUT_S = 30.0

T = TypeVar("T")


@triton.jit  # type: ignore[untyped-decorator]
def _nothing() -> None:
    pass


def graph_gap(device: Device, num_nodes: int, repeats: int) -> dict[str, Any]:
    """Return microseconds from one node of a graph to the next, for kernels that do nothing; and of replaying
    two graphs separately, which is what one graph less would save.
    """

    def kernels(count: int) -> Callable[[], None]:
        def launch() -> None:
            for _ in range(count):
                _nothing[(1,)](num_warps=1)

        return launch

    def measured() -> tuple[float, float]:
        many, one = device.capture(kernels(num_nodes)), device.capture(kernels(1))
        at = device.torch_device
        return median_ms(many.replay, at, repeats), median_ms(one.replay, at, repeats)

    many_ms, one_ms = _on_stream(device, measured)
    return {
        "nodes": num_nodes,
        "us_per_node": 1e3 * (many_ms - one_ms) / max(1, num_nodes - 1),
        "us_of_one_node": 1e3 * one_ms,
    }


def block_copy(device: Device, batch: int, repeats: int) -> dict[str, Any]:
    """Return microseconds of a step's copy of its integers to the device for `batch` rows: launched by
    itself, as a step does it, and as the first node of a graph with one small kernel behind it, less that
    kernel alone.
    """
    host = device.host_block(NUM_COLUMNS * batch)
    host.zero_()
    block = torch.zeros(NUM_COLUMNS * batch, dtype=torch.int64, device=device.torch_device)

    def copy() -> None:
        block.copy_(host, non_blocking=True)

    def kernel() -> None:
        block.add_(0)

    def both() -> None:
        copy()
        kernel()

    def measured() -> tuple[float, ...]:
        works = (copy, device.capture(both).replay, device.capture(kernel).replay)
        return tuple(median_ms(work, device.torch_device, repeats) for work in works)

    alone_ms, both_ms, kernel_ms = _on_stream(device, measured)
    return {
        "batch": batch,
        "bytes": host.nbytes,
        "us_alone": 1e3 * alone_ms,
        "us_in_a_graph": 1e3 * (both_ms - kernel_ms),
    }


def nccl_one_rank(device: Device, size: int, repeats: int) -> dict[str, Any]:
    """Check the project's group with one rank: that it can be made, that its all_reduce can be recorded, and
    what a replay returns; and return its microseconds. Uses NCCL on a GPU, gloo on a CPU. Raises GroupError
    if it cannot be made, RuntimeError if a replay changes the rank's values.
    """
    at = device.torch_device
    with tempfile.TemporaryDirectory() as folder:
        group = TorchGroup(meeting_in(Path(folder), 1), 0, 1, at, join_timeout_s=JOIN_TIMEOUT_S)
        try:
            group.all_reduce(torch.ones(1, device=at))  # makes the communicator, before a recording
            x = torch.arange(float(size), device=at)
            ms = _on_stream(device, lambda: _recorded_ms(group, x, device, repeats))
            if not torch.equal(x, torch.arange(float(size), device=at)):
                raise RuntimeError("the sum over one rank is not what that rank had")
        finally:
            group.close()
    return {"numbers": size, "us_all_reduce": 1e3 * ms}


def _on_stream(device: Device, work: Callable[[], T]) -> T:
    """Return the result of `work` on the forward stream, because nothing can be recorded on the
    default one.
    """
    wait(device.torch_device)  # for memory that `work` reads
    return device.forward_stream.launch(work).wait()


def _recorded_ms(group: TorchGroup, x: Tensor, device: Device, repeats: int) -> float:
    graph = device.capture(lambda: _reduce(group, x))
    return median_ms(graph.replay, device.torch_device, repeats)


def _reduce(group: TorchGroup, x: Tensor) -> None:
    group.all_reduce(x)
