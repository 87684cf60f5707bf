"""Pretended GPU: `with pretended_gpu() as gpu:` makes torch.cuda find one or several in this thread.

The product's CUDA path runs unchanged, from CudaDevice to Triton's kernels (interpreted), with device tensors
in memory of the host. Mistakes that a GPU would punish raise PretendedGpuError: see `operations` and
`timeline`. It shows no speed, does not run the compiled code, and shows no difference between torch's CPU and
CUDA kernels.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import Thread
from types import SimpleNamespace
from typing import Any, Self
from unittest.mock import patch
from weakref import WeakSet

import torch
from torch import Tensor

from tests.harness.pretended_gpu.memory import Pool, let_torch_guard_cuda
from tests.harness.pretended_gpu.nccl import ProcessGroupNCCL
from tests.harness.pretended_gpu.operations import Operations, Recording
from tests.harness.pretended_gpu.timeline import PretendedGpuError, Stream, Timeline, on_stream, recording_on

CAPABILITY = (9, 0)
NAME = "a pretended GPU"
PROTOTYPE_WARNING = (
    "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations"
)
MULTIPROCESSORS = 4
SHARED_MEMORY_BYTES = 227 << 10


def is_pretended() -> bool:
    """Return True if the GPU that torch finds is a pretended one."""
    return torch.cuda.is_available() and torch.cuda.get_device_name() == NAME


class PretendedGpu:
    def __init__(self, num_bytes: int, num_devices: int) -> None:
        self.timeline = Timeline(num_devices)
        self.operations = Operations(self.timeline, num_bytes)
        self.num_replays = 0
        self.nccl: type[ProcessGroupNCCL] = type(
            "ProcessGroupNCCL", (ProcessGroupNCCL,), {"gpu": self.operations}
        )
        self.compiled: dict[str, None] = {}
        """Variants that Triton would have compiled so far, in order (see benchmarks.gpu.kernels.variants)."""

    @property
    def launches(self) -> list[str]:
        """Names of all launches so far, replayed ones among them."""
        return self.operations.names

    @contextmanager
    def seen_by_new_threads(self) -> Iterator[None]:
        """Also by threads that are started now. No two may use it at the same time."""
        run = Thread.run

        def run_with_gpu(thread: Thread) -> None:
            torch._C._set_only_lift_cpu_tensors(True)
            with self.operations:
                run(thread)

        with patch.object(Thread, "run", run_with_gpu):
            yield

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        memory = self.operations.memory
        return memory.capacity - memory.num_reserved, memory.capacity

    def graph_pool_handle(self) -> tuple[int, int]:
        pools = self.operations.memory.pools
        pools.append(Pool())
        return (0, len(pools) - 1)

    def join_pool(self, graph: _Graph, handle: tuple[int, int]) -> None:
        pool = self.operations.memory.pools[handle[1]]
        if pool.graphs is not None and not pool.graphs:
            self.timeline.problem("a recording into a pool whose graphs are gone, which torch refuses")
        pool.graphs = WeakSet([*(pool.graphs or ()), graph])
        graph.recording.pool = pool


class _Generator(torch.Generator):
    """Generator of the host, whatever device it is for."""

    def __new__(cls, device: Any = None) -> Self:
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]


class _Graph:
    """torch.cuda.CUDAGraph."""

    gpu: PretendedGpu

    def __init__(self) -> None:
        self.recording = Recording()

    def replay(self) -> None:
        self.gpu.num_replays += 1
        self.gpu.operations.replay(self.recording)


@contextmanager
def _record(
    gpu: PretendedGpu,
    graph: _Graph,
    pool: tuple[int, int] | None = None,
    *,
    stream: Stream,
    capture_error_mode: str = "global",
) -> Iterator[None]:
    """torch.cuda.graph."""
    operations = gpu.operations
    assert operations.recording is None, "a recording within a recording"
    gpu.join_pool(graph, pool or gpu.graph_pool_handle())
    with recording_on(gpu.timeline, stream):
        operations.recording = graph.recording
        try:
            yield
        finally:
            operations.recording = None


def _cuda(gpu: PretendedGpu) -> dict[str, Any]:
    """Functions that torch.cuda has instead of its own."""
    timeline = gpu.timeline
    properties = SimpleNamespace(
        multi_processor_count=MULTIPROCESSORS, shared_memory_per_block_optin=SHARED_MEMORY_BYTES
    )

    def synchronize(device: Any = None) -> None:
        for stream in timeline.streams:
            timeline.wait_for(stream.clock, "torch.cuda.synchronize")

    warnings_left = [PROTOTYPE_WARNING]

    def set_sync_debug_mode(mode: str) -> None:
        # Torch warns at the end of a call, so the mode is set even where the warning is raised.
        timeline.forbids_waits = mode == "error"
        if warnings_left:
            warnings.warn(warnings_left.pop(), UserWarning, stacklevel=2)

    return {
        # Classes, because annotations of other libraries name them.
        "CUDAGraph": type("CUDAGraph", (_Graph,), {"gpu": gpu}),
        "Event": timeline.event_class,
        "Stream": timeline.stream_class,
        "_lazy_init": lambda: None,
        "current_stream": lambda device=None: timeline.current,
        "current_device": lambda: timeline.device,
        "device_count": lambda: timeline.num_devices,
        "empty_cache": gpu.operations.memory.empty_cache,
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_name": lambda device=None: NAME,
        "get_device_properties": lambda device=None: properties,
        "graph": partial(_record, gpu),
        "graph_pool_handle": gpu.graph_pool_handle,
        "init": lambda: None,
        "is_available": lambda: True,
        "mem_get_info": gpu.mem_get_info,
        "set_device": timeline.set_device,
        "set_sync_debug_mode": set_sync_debug_mode,
        "stream": partial(on_stream, timeline),
        "synchronize": synchronize,
    }


def _profile(profile: Any, activities: Any = None, **options: Any) -> Any:
    """torch.profiler.profile, which can be asked for what a GPU does where there is none, but then warns of
    each operation.
    """
    kept = {each for each in activities or () if each is not torch.profiler.ProfilerActivity.CUDA}
    return profile(activities=kept or None, **options)


def _tensor(gpu: PretendedGpu) -> dict[str, Any]:
    """Methods that torch.Tensor has instead of its own."""
    timeline, operations, to_numpy, to_device = gpu.timeline, gpu.operations, Tensor.numpy, Tensor.to

    def pin_memory(tensor: Tensor, device: Any = None) -> Tensor:
        return operations.pin(tensor.clone())

    def record_stream(tensor: Tensor, stream: Stream) -> None:
        if (allocation := operations.memory.of(tensor)) is not None:
            allocation.recorded.add(stream)

    def numpy(tensor: Tensor, *, force: bool = False) -> Any:
        if not tensor.is_cuda and (allocation := operations.pinned(tensor)) is not None:
            timeline.host_reads(allocation)
        return to_numpy(tensor, force=force)

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # The CPU's guard would be asked for the current device.
        named = [with_index(each) for each in args]
        return to_device(tensor, *named, **{key: with_index(value) for key, value in kwargs.items()})

    def with_index(value: Any) -> Any:
        is_device = isinstance(value, torch.device) or (isinstance(value, str) and value.startswith("cuda"))
        if not is_device or torch.device(value).type != "cuda":
            return value
        return torch.device("cuda", timeline.index_of(value))

    return {"pin_memory": pin_memory, "record_stream": record_stream, "numpy": numpy, "to": to}


@contextmanager
def pretended_gpu(num_bytes: int = 1 << 30, num_devices: int = 1) -> Iterator[PretendedGpu]:
    """num_bytes: of all devices together, of which a process is meant to use one.

    At the end raises PretendedGpuError for what was found and not raised, or was caught by somebody.
    """
    from triton.runtime.interpreter import GridExecutor, InterpretedFunction

    from benchmarks.gpu.kernels.variants import variant_of
    from tests.harness.pretended_gpu.interpreter import gpu_arithmetic

    let_torch_guard_cuda()
    gpu = PretendedGpu(num_bytes, num_devices)
    interpret = GridExecutor.__call__

    run = InterpretedFunction.run

    def run_variant(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        gpu.compiled[variant_of(kernel, args, kwargs)] = None
        return run(kernel, *args, grid=grid, warmup=warmup, **kwargs)

    def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
        gpu.operations.launch_triton(executor.fn, args, kwargs, partial(interpret, executor))

    owners: dict[Any, dict[str, Any]] = {
        torch: {"Generator": _Generator},
        torch.cuda: _cuda(gpu),
        torch.profiler: {"profile": partial(_profile, torch.profiler.profile)},
        Tensor: _tensor(gpu),
        GridExecutor: {"__call__": launch},
        InterpretedFunction: {"run": run_variant},
    }
    lifts = torch._C._only_lift_cpu_tensors()
    with ExitStack() as stack:
        for owner, own in owners.items():
            stack.enter_context(patch.multiple(owner, **own))
        # Torch for a CPU has none.
        stack.enter_context(patch.object(torch.distributed, "ProcessGroupNCCL", gpu.nccl, create=True))
        torch._C._set_only_lift_cpu_tensors(True)
        stack.callback(torch._C._set_only_lift_cpu_tensors, lifts)
        stack.enter_context(gpu_arithmetic())
        stack.enter_context(gpu.operations)
        yield gpu
    gpu.timeline.check()


__all__ = ["PretendedGpu", "PretendedGpuError", "is_pretended", "pretended_gpu"]
