"""TorchGroup: group of ranks through torch's collectives: NCCL between GPUs, gloo on a CPU without a C++
compiler.

gloo takes 180 to 300 us for what shared memory does in 1 to 11 (2 cores, EPYC, 2026-11). NCCL's calls are
launched on the current stream like kernels, and can be recorded in a CUDA graph. Its communicator is made by
the first call, which must not be recorded. If a rank has ended or does not come, gloo raises an error in the
waiting ranks. With NCCL only the device waits, and torch ends the process after LATE_S.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from model_worker.device.out_of_memory import is_out_of_memory
from model_worker.distributed.group import LATE_S, GroupError

LATE = timedelta(seconds=LATE_S)
STORE_FILE = "ranks.store"
LOOPBACK = "127.0.0.1"

Meeting: TypeAlias = Callable[[timedelta], Store]
"""Function of a timeout that returns the store through which ranks find each other."""

Options = TypeVar("Options")


def _launched(options: Options) -> Options:
    """Return the options for a call on the current stream. Otherwise NCCL uses a stream of its own, with two
    events for each call.
    """
    options.asyncOp = False  # type: ignore[attr-defined]
    return options


def meeting_in(folder: Path, size: int) -> Meeting:
    """Return a meeting in a folder that all ranks can access."""

    def meet(timeout: timedelta) -> Store:
        store: Store = dist.FileStore(str(folder / STORE_FILE), size)  # type: ignore[attr-defined]
        store.set_timeout(timeout)
        return store

    return meet


def meeting_at(host: str, port: int, *, listener_fd: int | None, name: str, timeout: timedelta) -> Store:
    """Meet at an address. Rank 0 has the listening socket, which the launcher keeps open, so that it outlives
    a rank 0 that is replaced. name: the same for ranks that were started together.
    """
    own: dict[str, Any] = {"is_master": listener_fd is not None}
    if listener_fd is not None:
        own["master_listen_fd"] = os.dup(listener_fd)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host, port, timeout=timeout, wait_for_workers=False, **own
    )
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]


class TorchGroup:
    """RankGroup of processes that have joined at one meeting."""

    def __init__(
        self,
        meet: Meeting,
        rank: int,
        size: int,
        device: torch.device,
        *,
        join_timeout_s: float,
        address: str = LOOPBACK,
    ) -> None:
        """Join the other ranks (with NCCL in the first call). meet: returns the store through which they find
        each other. address: where gloo listens. Raises GroupError when one does not come in time.
        """
        self.rank = rank
        self.size = size
        self._device = device
        self._join_timeout = timedelta(seconds=join_timeout_s)
        self._sum, self._least = _launched(dist.AllreduceOptions()), _launched(dist.AllreduceOptions())
        self._least.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        self._gather, self._broadcast = _launched(dist.GatherOptions()), _launched(dist.BroadcastOptions())
        self._group = self._call(
            lambda: _process_group(meet(self._join_timeout), rank, size, device, address)
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum as in RankGroup.all_reduce, in place."""
        self._finish(lambda: self._group.allreduce([x], self._sum))
        return x

    def gather(self, x: Tensor, width: int, out: Tensor | None = None) -> Tensor | None:
        """Gather as in RankGroup.gather."""
        if not len(x):  # a step that samples nothing
            return x.new_empty(0, width) if self.rank == 0 else None
        # Rank 0's own part is gathered in place: elsewhere it would be copied.
        parts = [x, *(torch.empty_like(x) for _ in range(1, self.size))] if self.rank == 0 else []
        self._finish(lambda: self._group.gather([parts] if parts else [], [x], self._gather))
        if not parts:
            return None
        starts = range(0, self.size * x.shape[1], x.shape[1])
        shown = [part[:, : max(0, width - start)] for part, start in zip(parts, starts, strict=True)]
        return torch.cat(shown, dim=1, out=out)

    def broadcast(self, x: Tensor) -> Tensor:
        """Broadcast as in RankGroup.broadcast, in place."""
        self._finish(lambda: self._group.broadcast([x], self._broadcast))
        return x

    def smallest(self, number: int) -> int:
        """Return the smallest of all ranks' numbers, as in RankGroup.smallest."""
        least = torch.tensor([number], device=self._device)
        self._group._set_default_timeout(max(self._join_timeout, LATE))
        self._finish(lambda: self._group.allreduce([least], self._least))
        self._group._set_default_timeout(LATE)
        return int(least)

    def close(self) -> None:
        """Shut gloo down. NCCL's communicator ends with the process, because destroying it would wait for all
        ranks.
        """
        if self._device.type != "cuda":
            self._group.shutdown()

    def _finish(self, collective: Callable[[], Any]) -> None:
        """Run a collective operation and wait for it; with NCCL there is nothing to wait for."""
        work = self._call(collective)
        if work is not None:
            self._call(work.wait)

    def _call(self, collective: Callable[[], Any]) -> Any:
        try:
            return collective()
        except RuntimeError as error:  # all that torch raises, for a lost and a late rank
            if is_out_of_memory(error):
                raise
            raise GroupError(f"tensor-parallel rank {self.rank} has lost the others: {error}") from error


def _process_group(store: Store, rank: int, size: int, device: torch.device, address: str) -> Any:
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = LATE
        return dist.ProcessGroupNCCL(store, rank, size, options)
    return gloo_group(store, rank, size, address, LATE)


def gloo_group(store: Store, rank: int, size: int, address: str, timeout: timedelta) -> Any:
    """Join the gloo group of all ranks that use the same store. Raises RuntimeError."""
    gloo = dist.ProcessGroupGloo
    options = gloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=address)]
    return gloo(store, rank, size, options)
