"""The group of ranks over NCCL: where its calls run, who waits, and how it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from model_worker.distributed.group import RankGroup
from model_worker.distributed.selection import join_group
from tests.harness.models.no_waits import no_waits
from tests.harness.pretended_gpu import PretendedGpu, pretended_gpu
from tests.harness.pretended_gpu.rank_process import RankProcess

Work = Callable[[PretendedGpu, RankGroup], Any]


def do(gpu: PretendedGpu, connection: Connection | None, folder: Path, work: Work) -> Any:
    rank = torch.cuda.current_device()
    device = torch.device("cuda", rank)
    with torch.inference_mode():
        return work(gpu, join_group(folder, rank, 2, device, join_timeout_s=60.0, on_wait=lambda: None))


@pytest.fixture
def gpu() -> Iterator[PretendedGpu]:
    with pretended_gpu(num_devices=2) as gpu:
        yield gpu


def all_calls(gpu: PretendedGpu, group: RankGroup) -> tuple[list[Any], int, int]:
    """Their results, how many launches they are, and how many of these are not on the current stream."""
    x = torch.arange(6.0, device="cuda").view(2, 3) + 10 * group.rank
    group.all_reduce(x.clone())
    parts = [x.clone(), x.clone(), torch.full((2,), group.rank, device="cuda")]
    stream, out = torch.cuda.current_stream(), torch.empty(2, 5, device="cuda")
    elsewhere = [each for each in gpu.timeline.streams if each is not stream]
    before, clocks = len(gpu.launches), [each.clock[each] for each in elsewhere]
    with no_waits():
        results = [group.all_reduce(parts[0]), group.gather(parts[1], 5, out), group.broadcast(parts[2])]
        nothing = group.gather(x[:0], 5)
    num_launches = len(gpu.launches) - before
    num_elsewhere = sum(each.clock[each] - then for each, then in zip(elsewhere, clocks, strict=True))
    assert nothing is None if group.rank else nothing is not None and nothing.shape == (0, 5)
    values = [None if each is None else each.tolist() for each in results]
    return [*values, group.smallest(7 - group.rank)], num_launches, num_elsewhere


def test_calls_are_launches_on_the_current_stream(
    gpu: PretendedGpu, other: RankProcess, tmp_path: Path
) -> None:
    """One each, and one that puts what is gathered side by side; nothing for nothing."""
    other.start(do, tmp_path, all_calls)
    total = [[10.0, 12, 14], [16, 18, 20]]
    assert do(gpu, None, tmp_path, all_calls) == (
        [total, [[0, 1, 2, 10, 11], [3, 4, 5, 13, 14]], [0, 0], 6],
        4,
        0,
    )
    assert other.result() == ([total, None, [0, 0], 6], 3, 0)


def end(gpu: PretendedGpu, group: RankGroup) -> None:
    group.smallest(1)
    if group.rank == 1:
        group.close()


def test_a_rank_may_end_when_others_have_ended(gpu: PretendedGpu, other: RankProcess, tmp_path: Path) -> None:
    """To destroy a communicator is a call of all ranks, and would wait for them."""
    other.start(do, tmp_path, end)
    do(gpu, None, tmp_path, end)
    other.result()
