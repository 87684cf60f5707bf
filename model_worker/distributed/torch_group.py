"""TorchGroup: ranks over torch's own collectives. NCCL between GPUs; gloo on a CPU without a C++ compiler.

gloo takes 180 to 300 us for what shared memory does in 1 to 11 (2 cores, EPYC, 2026-11). NCCL runs in the
order of the current stream and can be recorded in a CUDA graph; its communicator is made by the first call,
which no recording may contain.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from model_worker.distributed.group import LATE_S, GroupError

LATE = timedelta(seconds=LATE_S)
STORE_FILE = "ranks.store"


class TorchGroup:
    """A RankGroup of processes that have joined under one folder."""

    def __init__(
        self, folder: Path, rank: int, size: int, device: torch.device, *, join_timeout_s: float
    ) -> None:
        """Join the others. Raises GroupError when one is not there in time."""
        self.rank = rank
        self.size = size
        self._device = device
        self._join_timeout = timedelta(seconds=join_timeout_s)
        store = dist.FileStore(str(folder / STORE_FILE), size)  # type: ignore[attr-defined]
        store.set_timeout(self._join_timeout)
        self._group = self._call(lambda: _process_group(store, rank, size, device))

    def all_reduce(self, x: Tensor) -> Tensor:
        """See RankGroup. In place."""
        self._call(lambda: self._group.allreduce([x]).wait())
        return x

    def gather(self, x: Tensor) -> Tensor | None:
        """See RankGroup."""
        parts = [[torch.empty_like(x) for _ in range(self.size)]] if self.rank == 0 else []
        self._call(lambda: self._group.gather(parts, [x], dist.GatherOptions()).wait())
        return torch.cat(parts[0], dim=1) if parts else None

    def broadcast(self, x: Tensor) -> Tensor:
        """See RankGroup. In place."""
        self._call(lambda: self._group.broadcast([x]).wait())
        return x

    def smallest(self, number: int) -> int:
        """See RankGroup."""
        least = torch.tensor([number], device=self._device)
        self._group._set_default_timeout(max(self._join_timeout, LATE))
        self._call(lambda: self._group.allreduce([least], dist.ReduceOp.MIN).wait())
        self._group._set_default_timeout(LATE)
        return int(least)

    def close(self) -> None:
        self._group.shutdown()

    def _call(self, collective: Callable[[], Any]) -> Any:
        try:
            return collective()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # all that torch raises here, whether a rank is gone or late
            raise GroupError(f"tensor-parallel rank {self.rank} has lost the others: {error}") from error


def _process_group(store: Store, rank: int, size: int, device: torch.device) -> Any:
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = LATE
        return dist.ProcessGroupNCCL(store, rank, size, options)
    gloo = dist.ProcessGroupGloo
    options = gloo._Options()  # type: ignore[attr-defined]
    options._timeout = LATE
    options._devices = [gloo.create_device(hostname="127.0.0.1")]  # ranks are on one machine
    return gloo(store, rank, size, options)
