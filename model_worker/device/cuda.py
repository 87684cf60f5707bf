"""An NVIDIA GPU as a device. A stream is a CUDA stream; a ticket is an event on it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, TypeVar
from weakref import WeakSet

import numpy.typing as npt
import torch
from torch import Tensor

from model_worker.device.base import Outcome
from model_worker.device.out_of_memory import first_line
from runtime.base.environment import c_compiler
from runtime.base.errors import ConfigError

T = TypeVar("T")

# Oldest generation with bf16 in its matrix units and asynchronous copies to shared memory: Ampere.
MIN_CAPABILITY = (8, 0)
FP8_CAPABILITY = (8, 9)
FP8_NEEDS = "a GPU of compute capability 8.9 (Ada) or later"
# Compilers that Triton looks for if CC names none (triton/runtime/build.py).
COMPILERS = ("gcc", "clang")


def has_fp8() -> bool:
    """Return True if this process's GPU computes with float8, or there is no GPU."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= FP8_CAPABILITY


def _launch_errors() -> tuple[type[Exception], ...]:
    if find_spec("triton") is None:
        return ()
    from triton.runtime.errors import OutOfResources

    return (OutOfResources,)


def _check_compiler() -> None:
    """Raise ConfigError if there is no C compiler. Otherwise Triton would fail at its first launch, after the
    weights were loaded.
    """
    named = c_compiler()
    if not any(shutil.which(name) for name in (COMPILERS if named is None else (named,))):
        missing = "there is neither gcc nor clang" if named is None else f"CC={named} is no program"
        raise ConfigError(
            "device: cuda needs a C compiler, with which Triton builds what launches its kernels, and "
            f"{missing}; install gcc (apt install gcc), or name one in CC"
        )


class CudaTicket(Outcome[T]):
    __slots__ = ("event",)

    def __init__(self) -> None:
        self.event = torch.cuda.Event()
        self._error: Exception | None = None

    def run(self, fn: Callable[[], T]) -> None:
        try:
            self._value = fn()
        except Exception as error:  # as on CPU, the waiting thread must learn of it
            self._error = error

    def done(self) -> bool:
        return self._error is not None or self.event.query()

    def wait(self) -> T:
        self.event.synchronize()
        return self.value


class CudaStream:
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def launch(self, fn: Callable[[], T], after: CudaTicket[Any] | None = None) -> CudaTicket[T]:
        """Run `fn` at once, which enqueues its work; only the GPU waits for `after`."""
        ticket: CudaTicket[T] = CudaTicket()
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after.event)
            ticket.run(fn)
            ticket.event.record(self._stream)
        return ticket

    def close(self) -> None:
        self._stream.synchronize()


class CudaDevice:
    name = "cuda"
    prefers_one_pass = True
    compiles_when_launched = True
    has_own_memory = True
    replays_launches = True

    def __init__(self, *, threaded: bool, index: int = 0) -> None:
        """threaded: ignored, because a CUDA stream is always asynchronous."""
        if not torch.cuda.is_available():
            raise ConfigError("device: cuda was asked for, but torch finds no NVIDIA GPU; try --device cpu")
        capability = torch.cuda.get_device_capability(index)
        if capability < MIN_CAPABILITY:
            name = torch.cuda.get_device_name(index)
            raise ConfigError(
                f"device: {name} has compute capability {'.'.join(map(str, capability))}; the kernels need "
                f"{'.'.join(map(str, MIN_CAPABILITY))} (Ampere) or later; try --device cpu"
            )
        _check_compiler()
        self.launch_errors = _launch_errors()
        self.torch_device = torch.device("cuda", index)
        self._graph_pool: Any = None
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()  # of that pool
        try:
            torch.cuda.set_device(index)
            torch.zeros(1, device=self.torch_device)  # has this torch kernels for this GPU?
            self.forward_stream = CudaStream(self.torch_device)
            self.copy_stream = CudaStream(self.torch_device)
        except RuntimeError as error:  # of any kind: the GPU is full, used exclusively, or too new
            raise ConfigError(f"device: GPU {index} cannot be used: {first_line(error)}") from error

    def free_bytes(self, *, cached: bool = True) -> int:
        if cached:
            torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        return int(free)

    def host_block(self, size: int) -> Tensor:
        # The pinned allocator reuses a block only after the copies that read it.
        return torch.empty(size, dtype=torch.int64, pin_memory=True)

    def upload(self, host: Tensor) -> Tensor:
        return host.to(self.torch_device, non_blocking=True)

    def tensor(self, array: npt.NDArray[Any]) -> Tensor:
        return self.upload(torch.tensor(array).pin_memory())

    def download(self, tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        # The memory belongs to the stream that computed it, and must not be reused before this copy.
        tensor.record_stream(torch.cuda.current_stream(self.torch_device))
        return host

    def current_stream(self) -> int:
        return torch.cuda.current_stream(self.torch_device).cuda_stream

    def capture(self, fn: Callable[[], None]) -> torch.cuda.CUDAGraph:
        # Run once first: one-time work (compiling a kernel, a library's workspace) cannot be recorded.
        fn()
        if not self._graphs:
            # Graphs are replayed one after the other and keep nothing in the pool between replays, so they
            # share one. The pool ends with its last graph, and torch accepts no other graph afterwards.
            self._graph_pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self.torch_device)
        # thread_local: another thread of the process may allocate meanwhile.
        with torch.cuda.graph(graph, pool=self._graph_pool, stream=stream, capture_error_mode="thread_local"):
            fn()
        self._graphs.add(graph)
        return graph

    def close(self) -> None:
        self.forward_stream.close()
        self.copy_stream.close()
