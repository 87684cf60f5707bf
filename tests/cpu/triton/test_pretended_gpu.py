"""The pretended GPU finds what a GPU would punish, and computes what a GPU would compute."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.harness.models.no_waits import no_waits
from tests.harness.pretended_gpu import PretendedGpu, PretendedGpuError, pretended_gpu

AT = torch.device("cuda", 0)


@pytest.fixture
def gpu() -> Iterator[PretendedGpu]:
    with torch.inference_mode(), pretended_gpu(1 << 20, num_devices=2) as gpu:
        yield gpu
        gpu.timeline.problems.clear()  # tests look at them themselves


@triton.jit
def _double(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)


def double(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    _double[(1,)](x, out, len(x), BLOCK=8)
    return out


def numbers() -> Tensor:
    return torch.arange(5.0, device=AT)


def test_it_computes(gpu: PretendedGpu) -> None:
    x = numbers()
    assert x.is_cuda
    assert torch.ones(2).to("cuda").is_cuda
    assert torch.ones_like(torch.ones(2), device="cuda").is_cuda
    x[1:3] += 10
    x[torch.tensor([4], device=AT)] = 7.0
    assert double(x).cpu().tolist() == [0, 22, 24, 6, 14]
    assert torch.empty(3, device=AT).isnan().all()  # nobody has written it


def of_another_device(work: Callable[[Tensor], Any]) -> Any:
    torch.cuda.set_device(1)
    x = torch.arange(5.0, device="cuda")
    assert x.get_device() == torch.cuda.current_device() == 1
    torch.cuda.set_device(0)
    return work(x)


MISTAKES: dict[str, Callable[[], Any]] = {
    "host and device": lambda: numbers() + torch.ones(5),
    "an index on the host": lambda: torch.index_select(numbers(), 0, torch.tensor([0])),
    "a kernel of a host tensor": lambda: _double[(1,)](torch.ones(3), numbers(), 3, BLOCK=8),
    "pageable memory to the device": lambda: torch.ones(3).to(AT, non_blocking=True),
    "pageable memory from the device": lambda: torch.ones(5).copy_(numbers(), non_blocking=True),
    "memory of another device": lambda: torch.empty(3, device="cuda:1"),
    "a device that is not there": lambda: torch.cuda.set_device(2),
    "another device": lambda: of_another_device(lambda x: x + numbers()),
    "another device alone": lambda: of_another_device(lambda x: x + 1),
    "a copy from another device": lambda: of_another_device(lambda x: numbers().copy_(x)),
    "a kernel of another device": lambda: of_another_device(lambda x: _double[(1,)](x, x, 3, BLOCK=8)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused(mistake: str, gpu: PretendedGpu) -> None:
    with pytest.raises(PretendedGpuError):
        MISTAKES[mistake]()


WAITS: dict[str, Callable[[Tensor], Any]] = {
    "a value": lambda x: x.sum().item(),
    "a truth": lambda x: bool(x[0]),
    "a list": lambda x: x.tolist(),
    "a mask": lambda x: x[x > 1],
    "assignment by mask": lambda x: x.__setitem__(x > 1, 0.0),
    "nonzero": lambda x: x.nonzero(),
    "to the host": lambda x: x.cpu(),
    "an index on the host": lambda x: x[torch.tensor([0, 1])],
    "from the host": lambda x: torch.tensor([1, 2], device=AT),
    "synchronize": lambda x: torch.cuda.synchronize(),
}


@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_is_an_error_when_none_may_be_and_in_a_recording(wait: str, gpu: PretendedGpu) -> None:
    x = numbers()
    WAITS[wait](x)
    with no_waits(), pytest.raises(PretendedGpuError):
        WAITS[wait](x)
    WAITS[wait](x)
    with (
        pytest.raises(PretendedGpuError, match="in a recording"),
        torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.current_stream()),
    ):
        WAITS[wait](x)


def test_what_torch_says_of_forbidden_waits_is_raised_when_they_are_forbidden(gpu: PretendedGpu) -> None:
    """Once; so a test that forbids them by itself leaves them forbidden to those that follow."""
    x = numbers()
    with pytest.raises(UserWarning, match="Synchronization debug mode is a prototype feature"):
        torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(PretendedGpuError, match="the host waits"):
        x.cpu()
    torch.cuda.set_sync_debug_mode("default")
    x.cpu()


def test_waits_are_allowed_again_after_a_failure(gpu: PretendedGpu) -> None:
    x = numbers()
    with pytest.raises(PretendedGpuError, match="the host waits"), no_waits():
        x.cpu()
    x.cpu()


def test_a_replay_knows_memory_and_nothing_else(gpu: PretendedGpu) -> None:
    x, total = numbers(), torch.zeros(5, device=AT)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        total.copy_(double(x) * 2)
    x.fill_(1.0)
    before = len(gpu.launches)
    graph.replay()
    assert gpu.launches[before:] == ["_double", "mul", "copy"]
    assert total.cpu().tolist() == [4.0] * 5
    del x
    gc.collect()
    with pytest.raises(PretendedGpuError, match="free again"):
        graph.replay()


def test_a_kernel_that_is_recorded_is_not_computed_until_it_is_replayed(gpu: PretendedGpu) -> None:
    x, out = numbers(), torch.zeros(5, device=AT)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        _double[(1,)](x, out, 5, BLOCK=8)
    assert out.cpu().tolist() == [0.0] * 5
    graph.replay()
    assert out.cpu().tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]


def test_a_pool_ends_with_the_last_of_its_graphs(gpu: PretendedGpu) -> None:
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.current_stream()
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    for graph in graphs:
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            pass
    del graph, graphs
    with (
        pytest.raises(PretendedGpuError, match="graphs are gone"),
        torch.cuda.graph(torch.cuda.CUDAGraph(), pool=pool, stream=stream),
    ):
        pass


def test_streams_must_wait_for_each_other(gpu: PretendedGpu) -> None:
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    written, read = torch.cuda.Event(), torch.cuda.Event()
    with torch.cuda.stream(one):
        x = numbers()
        written.record()
    with torch.cuda.stream(other):
        with pytest.raises(PretendedGpuError, match="may not have finished"):
            x + 1
        other.wait_event(written)
        x + 1
        read.record()
    with torch.cuda.stream(one):
        with pytest.raises(PretendedGpuError, match="may not have finished"):
            x.add_(1)
        read.synchronize()  # the host waits: what it launches is later
        x.add_(1)


def test_memory_that_another_stream_uses_must_be_recorded_there(gpu: PretendedGpu) -> None:
    one, other = torch.cuda.Stream(), torch.cuda.Stream()

    def use(*, recorded: bool) -> None:
        with torch.cuda.stream(one):
            x = numbers()
            event = torch.cuda.Event()
            event.record()
        with torch.cuda.stream(other):
            other.wait_event(event)
            x + 1
            if recorded:
                x.record_stream(other)

    use(recorded=True)
    gpu.timeline.check()
    use(recorded=False)
    with pytest.raises(PretendedGpuError, match="free again"):
        gpu.timeline.check()


def test_the_host_reads_what_it_has_waited_for(gpu: PretendedGpu) -> None:
    host = torch.empty(5, pin_memory=True)
    host.copy_(numbers(), non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    with pytest.raises(PretendedGpuError, match="the host reads"):
        host.numpy()
    event.synchronize()
    assert host.numpy().tolist() == [0, 1, 2, 3, 4]


def test_what_has_no_elements_is_read_by_anybody(gpu: PretendedGpu) -> None:
    first, second = (
        torch.empty(0, pin_memory=True).copy_(numbers()[:0], non_blocking=True) for _ in range(2)
    )
    assert first.numpy().tolist() == second.numpy().tolist() == []


def of_bytes(num: int) -> Tensor:
    return torch.empty(num, dtype=torch.uint8, device=AT)


def free_bytes() -> int:
    return torch.cuda.mem_get_info()[0]


def test_memory_ends(gpu: PretendedGpu) -> None:
    free, total = torch.cuda.mem_get_info()
    assert free == total == 1 << 20
    half = of_bytes(1 << 19)
    part = half[: (1 << 18) + 1]  # another look at it takes nothing
    assert free_bytes() == total // 2
    with pytest.raises(torch.OutOfMemoryError):
        of_bytes((1 << 19) + 1)
    del half, part
    torch.cuda.empty_cache()
    assert free_bytes() == total


def test_what_is_given_back_is_kept_for_the_next_until_the_cache_is_emptied(gpu: PretendedGpu) -> None:
    total = free_bytes()
    for size in (1000, 3000, 2000):
        of_bytes(size)
    assert free_bytes() == total - 3072  # whole blocks
    of_bytes(total)  # the cache is emptied for it
    torch.cuda.empty_cache()
    assert free_bytes() == total


def test_a_pool_keeps_what_its_recordings_need_at_most_as_long_as_they_live(gpu: PretendedGpu) -> None:
    total, pool = free_bytes(), torch.cuda.graph_pool_handle()
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    for graph in graphs:
        with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream()):
            of_bytes(1024)
            of_bytes(2048)
    torch.cuda.empty_cache()
    assert free_bytes() == total - 2048
    del graph, graphs
    torch.cuda.empty_cache()
    assert free_bytes() == total


def test_an_error_is_not_lost_where_memory_is_let_go_on_its_way(gpu: PretendedGpu) -> None:
    def fail() -> Tensor:
        raise ValueError("on its way")

    with pytest.raises(ValueError, match="on its way"):
        torch.add(of_bytes(8), fail())
    torch.cuda.empty_cache()
    assert free_bytes() == 1 << 20


@triton.jit
def _product(a, b, out, kept, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    product = tl.dot(tl.load(a + at), tl.load(b + at))
    tl.store(out + at, product)
    tl.store(kept + at, product.to(kept.dtype.element_ty))


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float8_e4m3fn])
def test_bfloat16_and_float8_are_a_gpus(kept: torch.dtype, gpu: PretendedGpu) -> None:
    a, b = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    out, narrow = torch.empty(16, 16, device=AT), torch.empty(16, 16, device=AT, dtype=kept)
    _product[(1,)](a.to(AT), b.to(AT), out, narrow, BLOCK=16)
    expected = a.float() @ b.float()
    torch.testing.assert_close(out.cpu(), expected)
    assert torch.equal(narrow.cpu().float(), out.cpu().to(kept).float())  # rounded, not cut off
