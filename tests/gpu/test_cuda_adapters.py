"""Adapters on a GPU: what the kernels add, and rows of two adapters and the base in recorded steps."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from tests.gpu.conftest import new_threads_see_it
from tests.harness.pretended_gpu import is_pretended

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

IS_SMALL = is_pretended()
CUDA = "cuda"


@pytest.mark.parametrize("tokens", [4, 70] if IS_SMALL else [1, 64, 700])
def test_what_adapters_add_is_what_they_add_by_torch(tokens: int) -> None:
    from model_worker.kernels.linear import LoraPart
    from model_worker.ops.adapters import TorchAdapters, TorchRows
    from model_worker.ops.triton_adapters import TritonAdapters, TritonRows
    from tests.cpu.triton.adapters.test_triton_lora import batch_of

    depth, width, num_slots = (64, 48, 3) if IS_SMALL else (4096, 6144, 8)
    generator = torch.Generator().manual_seed(tokens)
    mine = TritonRows(num_slots + 1, num_slots, CUDA)
    theirs = TorchRows(num_slots + 1, num_slots)
    triton = TritonAdapters(mine, depth, width, torch.bfloat16, 64, 2)
    by_torch = TorchAdapters(theirs)
    for slot in range(num_slots):
        parts = []
        for column, rank in ((0, 8 * (slot + 1)), (width // 2, 5)):
            a = torch.randn(rank, depth, generator=generator) / depth**0.5
            b = torch.randn(width // 2, rank, generator=generator) / rank**0.5
            parts.append(LoraPart(column, a.bfloat16().to(CUDA), b.bfloat16().to(CUDA), 0.5))
        triton.install(slot, triton.pack(slot, parts))
        by_torch.install(slot, by_torch.pack(slot, parts))
        mine.set_row(slot, slot)
        theirs.set_row(slot, slot)
    batch = batch_of([row % (num_slots + 1) for row in range(tokens)], [1] * tokens)
    batch.rows = batch.rows.to(CUDA)
    batch.adapter_rows = batch.rows
    mine.prepare(batch)
    theirs.prepare(batch)
    x = torch.randn(tokens, depth, generator=generator).bfloat16().to(CUDA)
    y = torch.randn(tokens, width, generator=generator).bfloat16().to(CUDA)
    got, expected = triton(x, y.clone()), by_torch(x, y.clone())
    assert (expected - y).abs().max().item() > 0.1
    torch.testing.assert_close(got.cpu(), expected.cpu(), atol=0.05, rtol=0.05)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    from tests.cpu.triton.adapters.test_triton_lora import save_model_and_adapters

    return save_model_and_adapters(tmp_path_factory.mktemp("lora"))


def test_rows_have_the_tokens_of_the_cpu(paths: list[Path]) -> None:
    from tests.cpu.triton.adapters.test_triton_lora import SLOTS, generate, worker_with_adapters

    on_cpu = worker_with_adapters(paths, "cpu")
    expected = generate(on_cpu, SLOTS)
    on_cpu.close()
    with new_threads_see_it() if IS_SMALL else nullcontext():
        worker = worker_with_adapters(paths, "cuda", cuda_graph_bs="3")
        assert generate(worker, SLOTS) == expected
        worker.close()
