"""The group of ranks: what its calls return, in what order they add, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from model_worker.distributed import shared_memory
from model_worker.distributed.cut import by_heads, by_vocabulary, even
from model_worker.distributed.group import GroupError, RankGroup
from model_worker.distributed.selection import join_group
from model_worker.distributed.shared_memory import SLOT_BYTES, SharedMemoryGroup
from model_worker.distributed.torch_group import TorchGroup, meeting_in
from model_worker.kernels.native.build import BuildError
from tests.harness.models.native import native_kernels, needs_compiler
from tests.harness.models.rank_threads import JOIN_S, Join, join_shared_memory, on_ranks
from tests.harness.warm_start import WarmProcess, try_warm_start

ROOT = Path(__file__).resolve().parents[3]
SECOND_RANK = "tests.harness.second_rank"


def join_gloo(folder: Path, rank: int, size: int) -> RankGroup:
    return TorchGroup(meeting_in(folder, size), rank, size, torch.device("cpu"), join_timeout_s=JOIN_S)


@pytest.fixture(params=[pytest.param(join_shared_memory, marks=needs_compiler), join_gloo])
def join(request: pytest.FixtureRequest) -> Join:
    join: Join = request.param
    return join


def data_of(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 + rank))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sum_is_the_same_on_all_ranks_and_the_sum(
    size: int, dtype: torch.dtype, join: Join, tmp_path: Path
) -> None:
    """Sizes are nothing, what no vector divides, and more than a slot holds."""
    shapes = [(0, 5), (1, 1), (3, 67), (1823, 781)]
    inputs = [[data_of(rank, *shape).to(dtype) for rank in range(size)] for shape in shapes]

    def work(group: RankGroup) -> list[torch.Tensor]:
        return [group.all_reduce(parts[group.rank].clone()) for parts in inputs]

    results = on_ranks(size, tmp_path / "run", work, join)
    for n, parts in enumerate(inputs):
        expected = torch.stack(parts).double().sum(0)
        error = (results[0][n].double() - expected).abs()
        # gloo rounds after each addition.
        assert (error <= size * torch.finfo(dtype).eps * torch.stack(parts).abs().double().sum(0)).all()
        for other in results[1:]:
            assert torch.equal(other[n], results[0][n])


@needs_compiler
def test_ranks_are_added_in_their_order_with_one_rounding_whoever_comes_first(tmp_path: Path) -> None:
    """2**8 + 1 needs nine bits of mantissa: narrow sums would lose the ones that a wide sum keeps."""
    values = [256.0, 1.0, 1.0]

    def work(group: RankGroup) -> torch.Tensor:
        return group.all_reduce(torch.full((37,), values[group.rank], dtype=torch.bfloat16))

    for result in on_ranks(3, tmp_path / "narrow", work):
        assert result.eq(258.0).all()
    large = [3e7, -3e7, 1.0]

    def wide(group: RankGroup) -> list[torch.Tensor]:
        rounds = [group.all_reduce(torch.full((5,), large[group.rank])) for _ in range(50)]
        rounds += [group.all_reduce(torch.full((5,), large[::-1][group.rank])) for _ in range(50)]
        return rounds

    for rounds in on_ranks(3, tmp_path / "wide", wide):
        assert all(result.eq(1.0).all() for result in rounds[:50])
        assert all(result.eq(0.0).all() for result in rounds[50:])  # 1 is lost in 3e7


@pytest.mark.parametrize("shape", [(0, 4), (1, 3), (7, 33), (3, SLOT_BYTES // 4 + 5), (600, 900)])
def test_rank_0_gathers_columns_in_the_order_of_the_ranks(
    shape: tuple[int, int], join: Join, tmp_path: Path
) -> None:
    parts = [data_of(rank, *shape) for rank in range(2)]
    rows, columns = shape
    widths = [2 * columns, 2 * columns - 1, columns, 1]

    def work(group: RankGroup) -> list[torch.Tensor | None]:
        out = torch.empty(rows, widths[1])
        # In a row: nothing but the rounds themselves keeps rank 1 from overwriting what is still read.
        return [
            group.gather(parts[group.rank] + n, width, out if n == 1 else None)
            for n, width in enumerate(widths)
        ]

    results = on_ranks(2, tmp_path / "run", work, join)
    for n, (gathered, width) in enumerate(zip(results[0], widths, strict=True)):
        assert gathered is not None
        assert gathered.is_contiguous()
        assert torch.equal(gathered, (torch.cat(parts, 1) + n)[:, :width])
    assert results[1] == [None] * len(widths)


def test_the_first_ranks_tokens_reach_all_and_the_least_number_too(join: Join, tmp_path: Path) -> None:
    def work(group: RankGroup) -> tuple[list[list[int]], int]:
        # Many in a row: nothing but the rounds themselves keeps rank 0 from running ahead.
        tokens = [group.broadcast(torch.arange(3) * (n if group.rank == 0 else -1)) for n in range(200)]
        return [token.tolist() for token in tokens], group.smallest(40 - group.rank)

    for tokens, least in on_ranks(3, tmp_path / "run", work, join):
        assert tokens == [[0, n, 2 * n] for n in range(200)]
        assert least == 38


@pytest.fixture
def rank_one(tmp_path: Path) -> Iterator[WarmProcess | subprocess.Popen[bytes]]:
    """A second rank in a process of its own, which comes to one call and not to the next."""
    with (tmp_path / "output").open("w+b") as output:
        child = try_warm_start(SECOND_RANK, [str(tmp_path)], output.fileno()) or subprocess.Popen(
            [sys.executable, "-m", SECOND_RANK, str(tmp_path)], cwd=ROOT, stdout=output, stderr=output
        )
    yield child
    child.kill()
    child.wait()


def _meet(folder: Path, late_s: float) -> SharedMemoryGroup:
    group = SharedMemoryGroup(
        native_kernels(), folder, 0, 2, join_timeout_s=JOIN_S, on_wait=lambda: None, late_s=late_s
    )
    assert group.all_reduce(torch.ones(4)).eq(2).all()
    return group


@needs_compiler
def test_a_killed_rank_is_an_error_that_names_it(
    rank_one: WarmProcess | subprocess.Popen[bytes], tmp_path: Path
) -> None:
    group = _meet(tmp_path, late_s=3600.0)
    rank_one.kill()
    with pytest.raises(GroupError, match="rank 1 has ended"):
        group.all_reduce(torch.ones(4))
    group.close()


@needs_compiler
def test_a_rank_that_does_not_come_is_an_error_that_names_it(
    rank_one: WarmProcess | subprocess.Popen[bytes], tmp_path: Path
) -> None:
    group = _meet(tmp_path, late_s=3600.0)
    os.kill(rank_one.pid, signal.SIGSTOP)
    group._patience_s = 0.2  # not before: it may need longer to come to its first step
    with pytest.raises(GroupError, match=r"rank 1 has not come to a step within 0\.2 s"):
        group.all_reduce(torch.ones(4))
    group.close()


@needs_compiler
def test_what_an_ended_rank_has_left_behind_still_counts(
    rank_one: WarmProcess | subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """It has posted its part of a call, so the call has a result."""
    group = SharedMemoryGroup(native_kernels(), tmp_path, 0, 2, join_timeout_s=JOIN_S, on_wait=lambda: None)
    # It waits for us in its first call and has posted; killed there, it has ended with its part done.
    counter = torch.frombuffer(group._map, dtype=torch.int32)
    while counter[shared_memory.COUNTER_BYTES // 4] == 0:
        assert rank_one.poll() is None
    rank_one.kill()
    rank_one.wait()
    assert group.all_reduce(torch.ones(4)).eq(2).all()
    with pytest.raises(GroupError, match="rank 1 has ended"):
        group.all_reduce(torch.ones(4))
    group.close()


@needs_compiler
def test_a_rank_that_never_starts_is_an_error(tmp_path: Path) -> None:
    waits: list[int] = []
    with pytest.raises(GroupError, match="rank 1 has not started in time"):
        SharedMemoryGroup(
            native_kernels(), tmp_path, 0, 2, join_timeout_s=0.05, on_wait=lambda: waits.append(1)
        )
    assert waits


@needs_compiler
@pytest.mark.parametrize("cores", [1, 2])
def test_nobody_spins_with_more_ranks_than_cores(
    cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))

    def work(group: RankGroup) -> int:
        assert isinstance(group, SharedMemoryGroup)
        assert group.all_reduce(torch.ones(3)).eq(2).all()
        spin_ns: int = group._call.spin_ns
        return spin_ns

    assert on_ranks(2, tmp_path / "run", work) == [shared_memory.SPIN_NS if cores == 2 else 0] * 2


def test_without_a_compiler_ranks_talk_over_gloo_and_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: Path, dtype: torch.dtype | None) -> None:
        raise BuildError("there is no C++ compiler")

    monkeypatch.setattr("model_worker.distributed.selection.load_kernels", refuse)

    def join(folder: Path, rank: int, size: int) -> RankGroup:
        return join_group(
            folder, rank, size, torch.device("cpu"), join_timeout_s=JOIN_S, on_wait=lambda: None
        )

    kinds = on_ranks(2, tmp_path / "run", lambda group: type(group), join)
    assert kinds == [TorchGroup, TorchGroup]
    assert "gloo" in caplog.text


def test_cuts_cover_a_dimension_once_and_share_heads_where_there_are_few() -> None:
    for total, ranks in ((80, 4), (80, 1)):
        places = [n for rank in range(ranks) for n in range(total)[even(total, rank, ranks).where]]
        assert places == list(range(total))
    for vocab_size, ranks in ((97, 2), (97, 4), (32000, 8), (7, 4)):
        cuts = [by_vocabulary(vocab_size, rank, ranks) for rank in range(ranks)]
        assert [n for cut in cuts for n in range(vocab_size)[cut.where]] == list(range(vocab_size))
        assert len({cut.room for cut in cuts}) == 1
        # What is gathered has the vocabulary in front: only room behind it is empty.
        filled = [cut.room == cut.length for cut in cuts]
        assert filled == sorted(filled, reverse=True)
    assert [by_heads(2, 16, rank, 4).start for rank in range(4)] == [0, 0, 16, 16]
    assert [by_heads(8, 16, rank, 4).where for rank in range(4)] == [
        slice(32 * rank, 32 * rank + 32) for rank in range(4)
    ]
