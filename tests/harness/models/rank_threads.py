"""Ranks as threads of the test: the real group over shared memory, whose calls let other threads run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from model_worker.distributed.group import RankGroup
from model_worker.distributed.shared_memory import SharedMemoryGroup
from tests.harness.models.native import native_kernels

T = TypeVar("T")
JOIN_S = 60.0
Join = Callable[[Path, int, int], RankGroup]


def join_shared_memory(folder: Path, rank: int, size: int) -> RankGroup:
    return SharedMemoryGroup(
        native_kernels(), folder, rank, size, join_timeout_s=JOIN_S, on_wait=lambda: None
    )


def on_ranks(
    size: int, folder: Path, work: Callable[[RankGroup], T], join: Join = join_shared_memory
) -> list[T]:
    """Return what `work` returned on each rank. `folder` has not been met in before; raises what a rank
    raised.
    """
    folder.mkdir(parents=True)
    together = threading.Barrier(size)

    def run(rank: int) -> T:
        group = join(folder, rank, size)
        try:
            return work(group)
        finally:
            together.wait(JOIN_S)  # nobody leaves while another still reads
            group.close()

    with ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(run, rank) for rank in range(size)]]
