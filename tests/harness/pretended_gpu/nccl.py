"""Pretended NCCL: torch's ProcessGroupNCCL between processes that have a pretended GPU each.

Like the real one it computes on CUDA streams: on the current one or, if `asyncOp` is left on, on a stream of
its own, which waits for the current one, and for which the current one waits in `Work.wait`. For the timeline
the host does not wait for it. In fact the work is done when it is launched, so a launch ends when all ranks
have made it. A recording holds collectives like kernels: ranks meet in the replays.

It refuses what torch or NCCL refuses, and mistakes that they do not notice: if ranks do not make the same
calls in the same order, each of them gets an error, where NCCL would hang or mix up bytes. As with NCCL
nobody is told that another rank has ended: the collective stays unfinished until torch's watchdog ends the
process.

Not supported: other collectives than the product's, coalescing, a communicator of a second device, and NCCL's
order of additions. Here all ranks add in the order of the ranks, and round every time.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store
from torch.utils._python_dispatch import _disable_current_modes

from tests.harness.pretended_gpu.operations import Launch, Operations
from tests.harness.pretended_gpu.timeline import Event, Stream, on_stream

DTYPES = {
    *(torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}
CALL_BYTES = 128
"""Size of the message in which a rank describes its next call."""
# torch's operations are equal to their names, and have no hash of their own.
COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
}


class Options:
    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self._timeout = timedelta(minutes=10)


class Work:
    """A collective on a stream of its own."""

    def __init__(self, operations: Operations, end: Event, tensors: Sequence[Tensor]) -> None:
        self._operations = operations
        self._end = end
        self._tensors = tensors  # torch keeps them until somebody waits

    def wait(self) -> bool:
        """The current stream waits, and not the host."""
        self._operations.timeline.current.wait_event(self._end)
        self._tensors = ()
        return True


class ProcessGroupNCCL:
    """Process group; a subclass knows its GPU."""

    gpu: Operations
    Options = Options

    def __init__(self, store: Store, rank: int, size: int, options: Any = None) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._timeout: timedelta = (options or Options())._timeout
        self._others: Any = None
        self._stream: Stream | None = None

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = dist.ReduceOp.SUM) -> Work | None:
        """opts: AllreduceOptions, or the operation, which makes it asynchronous."""
        tensor, operation = self._only(tensors), getattr(opts, "reduceOp", opts)
        known = [name for name in COMBINE if operation == getattr(dist.ReduceOp, name)]
        if not known:
            raise ValueError(f"Cannot use {operation} with NCCL")
        combine = COMBINE[known[0]]
        if not tensor.numel():
            return self._nothing(opts)  # NCCL discards it
        into = self.gpu.host(tensor)

        def add() -> None:
            first, *rest = self._all_gather(into)
            for each in rest:
                first = combine(first, each)
            into.copy_(first)

        return self._launch("allreduce", tensor, opts, add, reads=[tensor], writes=[tensor], detail=known[0])

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Work | None:
        tensor, root = self._only(tensors), opts.rootRank if opts else 0
        if not tensor.numel():
            return self._nothing(opts)
        into = self.gpu.host(tensor)
        reads, writes = ([tensor], []) if self._rank == root else ([], [tensor])

        def take() -> None:
            into.copy_(self._all_gather(into)[root])

        return self._launch(
            "broadcast", tensor, opts, take, reads=reads, writes=writes, detail=f"from {root}"
        )

    def gather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work | None:
        tensor, root = self._only(inputs), opts.rootRank if opts else 0
        if self._rank != root:
            if outputs:
                raise ValueError("requires empty output on non-root")
            into = []
        else:
            if len(outputs) != 1 or len(outputs[0]) != self._size:
                raise ValueError(
                    f"requires a single-element output list containing a list with {self._size} tensors"
                )
            into = [self._checked(each) for each in outputs[0]]
            if any((each.shape, each.dtype) != (tensor.shape, tensor.dtype) for each in into):
                raise ValueError("All tensor operands must have the same size and type as the input")
            if into[root] is not tensor:
                into[root].copy_(tensor)  # torch's own launch, on the current stream
            del into[root]
        of, to = self.gpu.host(tensor), [self.gpu.host(each) for each in into]

        def take() -> None:
            parts = self._all_gather(of)
            del parts[root]
            for each, part in zip(to, parts, strict=bool(to)):
                each.copy_(part)

        return self._launch("gather", tensor, opts, take, reads=[tensor], writes=into, detail=f"to {root}")

    def shutdown(self) -> None:
        """Destroying a communicator is a call of all its ranks, too: it waits for them."""
        if self._others is not None:
            self._meet("shutdown")

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def lost(self, why: str, timeout_s: float) -> NoReturn:
        """Another rank has ended: NCCL's kernel goes on waiting for it, and so does whoever waits for that,
        until torch's watchdog takes the process down.
        """
        time.sleep(timeout_s)
        print(
            f"[Rank {self._rank}] Watchdog caught collective operation timeout: {why}",
            file=sys.stderr,
            flush=True,
        )
        os.abort()

    # Of one tensor

    def _only(self, tensors: Sequence[Tensor]) -> Tensor:
        if len(tensors) != 1:
            raise ValueError("Expecting one tensor only but got multiple")
        return self._checked(tensors[0])

    def _checked(self, tensor: Tensor) -> Tensor:
        if not tensor.is_cuda or tensor.is_sparse:
            raise ValueError("Tensors must be CUDA and dense")
        if not tensor.is_contiguous():
            raise ValueError("Tensors must be contiguous")
        if tensor.dtype not in DTYPES:
            raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")
        return tensor

    # On a stream

    def _launch(
        self,
        name: str,
        tensor: Tensor,
        opts: Any,
        run: Callable[[], None],
        *,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        detail: str,
    ) -> Work | None:
        self._connect()
        gpu, timeline = self.gpu, self.gpu.timeline
        gpu.check_devices(name, [tensor])
        call = f"{name} {detail} of {tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}"

        def meet_and_run() -> None:
            self._meet(call)
            run()

        read = [found for each in reads for found in gpu.memory_of(each)]
        written = [found for each in writes for found in gpu.memory_of(each)]
        launch = Launch(f"nccl_{name}", meet_and_run, read, written)
        if not getattr(opts, "asyncOp", True):
            gpu.launch(launch)
            return None
        assert self._stream is not None
        begin, end = timeline.event_class(), timeline.event_class()
        begin.record()
        self._stream.wait_event(begin)
        with on_stream(timeline, self._stream):
            gpu.launch(launch)
            end.record()
        return Work(gpu, end, [*reads, *writes])

    def _nothing(self, opts: Any) -> Work | None:
        return Work(self.gpu, self.gpu.timeline.event_class(), ()) if getattr(opts, "asyncOp", True) else None

    # Between processes

    def _connect(self) -> None:
        """Make the communicator, which the first collective does."""
        if self._others is not None:
            return
        if self.gpu.timeline.is_recording:
            self.gpu.timeline.problem(
                "a communicator is made in a recording: the first collective must be outside"
            )
        gloo = dist.ProcessGroupGloo
        options = gloo._Options()  # type: ignore[attr-defined]
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = self._timeout
        with _disable_current_modes():
            store = dist.PrefixStore("pretended_nccl", self._store)  # type: ignore[attr-defined]
            self._others = gloo(store, self._rank, self._size, options)
            devices = self._all_gather(torch.tensor([self.gpu.timeline.device]))
        if len({int(each) for each in devices}) < self._size:
            raise dist.DistBackendError(
                f"Duplicate GPU detected: the ranks have {[int(each) for each in devices]}"
            )
        self._stream = self.gpu.timeline.stream_class()

    def _meet(self, call: str) -> None:
        """Find out whether all ranks make the same call."""
        said = torch.frombuffer(bytearray(call.encode().ljust(CALL_BYTES)), dtype=torch.uint8)
        with _disable_current_modes():
            calls = [bytes(each.numpy()).decode().rstrip() for each in self._all_gather(said)]
        if len(set(calls)) > 1:
            each = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(calls))
            self.gpu.timeline.problem(f"the ranks do not make the same call: {each}")

    def _all_gather(self, mine: Tensor) -> list[Tensor]:
        """Return what all ranks have, in their order. All have as much."""
        if not mine.numel():
            return [mine] * self._size
        flat = mine.contiguous().view(-1).view(torch.uint8)
        parts = [torch.empty_like(flat) for _ in range(self._size)]
        deadline = time.monotonic() + self._timeout.total_seconds()
        try:
            self._others._set_default_timeout(self._timeout)
            self._others.allgather([parts], [flat]).wait()
        except RuntimeError as error:
            self.lost(str(error), max(0.0, deadline - time.monotonic()))
        return [each.view(mine.dtype).view(mine.shape) for each in parts]
