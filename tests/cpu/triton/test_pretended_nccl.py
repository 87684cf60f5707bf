"""The pretended NCCL computes what NCCL would, where it would, and refuses what NCCL would, or hang on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.harness.models.no_waits import no_waits
from tests.harness.pretended_gpu import PretendedGpu, PretendedGpuError, pretended_gpu
from tests.harness.pretended_gpu.rank_process import RankProcess

Work = Callable[[Any, int], Any]
"""Work of a rank: (group, rank) -> what the test looks at."""
Both = Callable[[Work], tuple[Any, Any]]
TIMEOUT = timedelta(seconds=60)


def join(path: Path, rank: int) -> Any:
    store = dist.FileStore(str(path), 2)  # type: ignore[attr-defined]
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    return dist.ProcessGroupNCCL(store, rank, 2, options)


def work_on(gpu: PretendedGpu, connection: Connection, path: Path, work: Work) -> Any:
    with torch.inference_mode():
        result = work(join(path, 1), 1)
    gpu.timeline.problems.clear()  # the work has looked at them itself
    return result


@pytest.fixture
def gpu() -> Iterator[PretendedGpu]:
    with torch.inference_mode(), pretended_gpu(num_devices=2) as gpu:
        yield gpu
        gpu.timeline.problems.clear()  # tests look at them themselves


@pytest.fixture
def both(gpu: PretendedGpu, other: RankProcess, tmp_path: Path) -> Both:
    """Do a work on both ranks."""

    def both(work: Work) -> tuple[Any, Any]:
        path = tmp_path / "store"
        other.start(work_on, path, work)
        try:
            mine = work(join(path, 0), 0)
        finally:
            theirs = other.result()
        return mine, theirs

    return both


def numbers(rank: int) -> Tensor:
    return torch.arange(5.0, device="cuda") + 10 * rank


def collectives(group: Any, rank: int) -> list[Any]:
    x, least, told = numbers(rank), numbers(rank), numbers(rank)
    work = group.allreduce([x])
    group.allreduce([least], dist.ReduceOp.MIN).wait()
    group.broadcast([told]).wait()
    parts = [[torch.empty(5, device="cuda") for _ in range(2)]] if rank == 0 else []
    group.gather(parts, [numbers(rank)], dist.GatherOptions()).wait()
    work.wait()
    return [x.tolist(), least.tolist(), told.tolist(), [each.tolist() for row in parts for each in row]]


def test_it_computes(both: Both) -> None:
    zero, ten = [0.0, 1, 2, 3, 4], [10.0, 11, 12, 13, 14]
    first, second = both(collectives)
    assert first == [[10.0, 12, 14, 16, 18], zero, zero, [zero, ten]]
    assert second == [[10.0, 12, 14, 16, 18], zero, zero, []]


def recorded(group: Any, rank: int) -> list[list[float]]:
    x, total = numbers(rank), torch.zeros(5, device="cuda")
    group.allreduce([total]).wait()  # the communicator
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        total.copy_(x)
        group.allreduce([total]).wait()
        total.mul_(2)
    results = []
    for value in (1.0, 2.0):
        x.fill_(value + rank)
        graph.replay()
        results.append(total.tolist())
    return results


def test_ranks_meet_in_replays(both: Both) -> None:
    expected = [[6.0] * 5, [10.0] * 5]
    assert both(recorded) == (expected, expected)


def refusal(work: Callable[[], Any], *kinds: type[Exception]) -> str:
    with pytest.raises(kinds or (PretendedGpuError,)) as caught:
        work()
    return f"{type(caught.value).__name__}: {caught.value}"


def different(group: Any, rank: int) -> list[str]:
    """Calls that are not the same on both ranks."""
    options = dist.BroadcastOptions()
    options.rootRank = rank
    calls: list[Callable[[Tensor], Any]] = [
        lambda x: (group.allreduce if rank else group.broadcast)([x]),
        lambda x: group.allreduce([x[: 4 + rank]]),
        lambda x: group.allreduce([x if rank else x.double()]),
        lambda x: group.allreduce([x], [dist.ReduceOp.MIN, dist.ReduceOp.SUM][rank]),
        lambda x: group.broadcast([x], options),
    ]
    return [refusal(lambda call=call: call(numbers(rank))) for call in calls]  # type: ignore[misc]


def test_ranks_that_do_not_make_the_same_call_are_told_so(both: Both) -> None:
    first, second = both(different)
    assert first == second
    what = ["broadcast.*allreduce", "of 4.*of 5", "float64.*float32", "MIN.*SUM", "from 0.*from 1"]
    for text, differing in zip(first, what, strict=True):
        assert re.search(f"do not make the same call: rank 0: .*{differing}", text)


def refused(group: Any, rank: int) -> list[str]:
    """Calls that a rank needs no other to refuse."""
    x = numbers(rank)
    calls = {
        "dense": lambda: group.allreduce([torch.ones(3)]),
        "contiguous": lambda: group.allreduce([torch.ones(4, 4, device="cuda").t()]),
        "multiple": lambda: group.allreduce([x, x]),
        "not supported": lambda: group.allreduce([x.to(torch.float8_e4m3fn)]),
        "BXOR": lambda: group.allreduce([x], dist.ReduceOp.BXOR),
        "empty output" if rank else "list with 2": lambda: group.gather([[x]], [x]),
    }
    return [word for word, call in calls.items() if word in refusal(call, ValueError, TypeError)]


def test_what_torch_refuses_is_refused(both: Both) -> None:
    first, second = both(refused)
    assert [len(first), len(second)] == [6, 6]


def unordered(group: Any, rank: int) -> list[str]:
    """Work that would run beside a collective; a communicator, and an end, that a recording cannot have."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    x = numbers(rank)

    def record(work: Callable[[], Any]) -> None:
        with torch.cuda.graph(graph, stream=stream):
            work()

    def use_early() -> None:
        group.allreduce([x])
        x.add_(1)

    early = refusal(lambda: record(lambda: group.allreduce([x])))
    texts = [early]
    for within in (lambda work: work(), record):
        texts.append(refusal(lambda within=within: within(use_early)))  # type: ignore[misc]
        torch.cuda.synchronize()
    texts.append(refusal(lambda: record(lambda: group.allreduce([numbers(rank)]))))
    return texts


def test_a_collective_is_where_its_stream_is(both: Both) -> None:
    what = ["communicator is made", "may not have finished", "may not have finished", "nobody has waited"]
    for texts in both(unordered):
        for text, expected in zip(texts, what, strict=True):
            assert expected in text


def on_the_current_stream(group: Any, rank: int) -> tuple[list[float], bool]:
    """Where nobody has to wait, and there is nothing to wait with; the host waits for the values alone."""
    x, options = numbers(rank), dist.AllreduceOptions()
    options.asyncOp = False
    with no_waits():
        work = group.allreduce([x], options)
        y = x + 1
    return y.tolist(), work is None


def test_a_synchronous_collective_is_on_the_current_stream(both: Both) -> None:
    expected = ([11.0, 13, 15, 17, 19], True)
    assert both(on_the_current_stream) == (expected, expected)


def on_one_device(group: Any, rank: int) -> str:
    with torch.cuda.stream(torch.cuda.Stream(0)):
        return refusal(lambda: group.allreduce([numbers(rank)]), dist.DistBackendError)


def test_two_ranks_on_one_gpu_are_refused(both: Both) -> None:
    assert all("Duplicate GPU" in text for text in both(on_one_device))


def test_an_ended_rank_is_never_missed(
    gpu: PretendedGpu, other: RankProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collective, or a communicator's end, is unfinished until torch's watchdog ends the process."""

    def lost(group: Any, why: str, timeout_s: float) -> None:
        assert 0 < timeout_s <= TIMEOUT.total_seconds()
        raise KeyError

    monkeypatch.setattr(gpu.nccl, "lost", lost)
    other.start(work_on, tmp_path / "store", collectives)
    group = join(tmp_path / "store", 0)
    collectives(group, 0)
    other.result()  # its group is gone
    with pytest.raises(KeyError):
        group.allreduce([numbers(0)])
    with pytest.raises(KeyError):
        group.shutdown()
