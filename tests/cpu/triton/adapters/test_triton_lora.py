"""Adapters by Triton's kernels: against torch's, and on the pretended GPU from a directory to tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from model_worker.attention.forward_batch import ForwardBatch
from model_worker.device import make_device
from model_worker.kernels.linear import LoraPart
from model_worker.load_worker import load_worker
from model_worker.ops.adapters import TorchAdapters, TorchRows
from model_worker.ops.triton_adapters import TritonAdapters, TritonRows
from model_worker.worker import ModelWorker
from runtime.settings.config import RuntimeConfig
from runtime.wire.plan import NO_ADAPTER, AdapterLoaded, AdapterRef, LoadAdapter
from tests.harness.models.adapted import AdapterCase, save_adapter, wait_for_answers
from tests.harness.models.no_waits import no_waits
from tests.harness.models.plans import FEEDBACK, GREEDY, PlanWriter, save_tiny_llama, tokens_of
from tests.harness.pretended_gpu import PretendedGpu, pretended_gpu

NUM_SLOTS = 5
MAX_ROWS = 6
MAX_RANK = 24
# Of a layer that packs three modules: of all, of two of them, and of one.
MODULES = {0: ((0, 40), (40, 30), (70, 7)), 1: ((0, 40), (70, 7)), 2: ((40, 30),)}


def batch_of(rows: Sequence[int], lens: Sequence[int]) -> ForwardBatch:
    none, at = torch.zeros(0, dtype=torch.int64), torch.tensor(rows)
    starts = [sum(lens[:i]) for i in range(len(lens) + 1)]
    batch = ForwardBatch(none, none, none, starts, list(lens), at, none, 4, 0, None)
    batch.adapter_rows = at.repeat_interleave(torch.tensor(lens))
    return batch


def part(generator: torch.Generator, rank: int, columns: tuple[int, int], depth: int) -> LoraPart:
    a = torch.randn(rank, depth, generator=generator) / depth**0.5
    b = torch.randn(columns[1], rank, generator=generator) / rank**0.5
    return LoraPart(columns[0], a, b, 0.5 + rank / 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("depth", [36, 1100])
@pytest.mark.parametrize(
    ("rows", "lens"),
    [([3], [1]), ([0, 1, 2, 3, 4, 5], [1] * 6), ([0, 5, 1, 2], [1, 1, 90, 40])],
    ids=["one", "decodes", "chunks"],
)
def test_what_adapters_add_is_what_they_add_by_torch(
    rows: list[int], lens: list[int], depth: int, dtype: torch.dtype
) -> None:
    """Ranks and modules that differ; a slot that is empty again, and a row without an adapter."""
    generator = torch.Generator().manual_seed(depth)
    mine, theirs = TritonRows(MAX_ROWS, NUM_SLOTS, "cpu"), TorchRows(MAX_ROWS, NUM_SLOTS)
    triton = TritonAdapters(mine, depth, 77, dtype, MAX_RANK, 3)
    by_torch = TorchAdapters(theirs)
    for each in (mine, theirs):
        for row, slot in enumerate((0, 2, 1, 2, 3, NO_ADAPTER)):
            each.set_row(row, slot)
    for slot, rank in ((0, 24), (1, 1), (2, 17), (3, 8)):
        parts = [part(generator, rank, columns, depth) for columns in MODULES[slot % 3]]
        for adapters in (triton, by_torch):
            adapters.install(slot, adapters.pack(slot, parts))  # type: ignore[arg-type]
    for adapters in (triton, by_torch):
        adapters.install(3, None)
    batch = batch_of(rows, lens)
    mine.prepare(batch)
    theirs.prepare(batch)
    x = torch.randn(sum(lens), depth + 3, generator=generator).to(dtype)[:, :depth]
    y = torch.randn(sum(lens), 77, generator=generator).to(dtype)
    expected = by_torch(x, y.clone())
    got = triton(x, y.clone())
    assert (expected - y).abs().max() > 0.5
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
    without = [i for i, row in enumerate(batch.adapter_rows.tolist()) if row in (4, 5)]  # type: ignore[union-attr]
    assert torch.equal(got[without], y[without])


def test_a_step_of_the_base_alone_launches_nothing() -> None:
    rows = TritonRows(MAX_ROWS, NUM_SLOTS, "cpu")
    adapters = TritonAdapters(rows, 8, 8, torch.float32, 8, 1)
    batch = batch_of([0, 1], [1, 1])
    rows.prepare(batch)
    assert rows.tiles is not None
    batch.adapter_rows = None
    rows.prepare(batch)
    y = torch.zeros(2, 8)
    assert rows.tiles is None
    assert torch.equal(adapters(torch.ones(2, 8), y), torch.zeros(2, 8))


CASES = [
    AdapterCase(8, config={"lora_alpha": 48}),
    AdapterCase(3, lambda name: name.endswith(("down_proj", "k_proj", "q_proj")), config={"lora_alpha": 30}),
]
PROMPTS = [[1, 5, 9, 33, 2, 71, 8], [7, 7, 50, 21], [96, 3, 14, 15, 92, 65, 35, 89, 79, 32, 38]]
SLOTS = (1, 0, NO_ADAPTER)
NUM_STEPS = 2


def save_model_and_adapters(folder: Path) -> list[Path]:
    """Return the paths of the model, and of its adapters."""
    hf = save_tiny_llama(folder / "model")
    for number, case in enumerate(CASES):
        save_adapter(hf, case, folder / f"adapter-{number}", seed=number)
    return [folder / "model", *(folder / f"adapter-{number}" for number in range(len(CASES)))]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return save_model_and_adapters(tmp_path_factory.mktemp("lora"))


def worker_with_adapters(paths: list[Path], device: str, **settings: Any) -> ModelWorker:
    sizes: dict[str, Any] = {"context_length": 64, "max_running_requests": 3, "max_total_tokens": 256}
    sizes |= {"page_size": 4, "dtype": "float32", "device": device, "chunked_prefill_size": 12}
    sizes |= {"enable_lora": True, "max_loras": len(CASES), "max_lora_rank": 8}
    config = RuntimeConfig(model=str(paths[0]), **sizes, **settings)
    worker = load_worker(config, make_device(device, threaded=False), lambda: None)
    for slot, path in enumerate(paths[1:]):
        worker.load_adapter(LoadAdapter(slot, AdapterRef(path.name, slot + 1, "", str(path))))
        assert worker.adapters is not None
        (answer,) = wait_for_answers(worker.adapters, 1)
        assert isinstance(answer, AdapterLoaded), answer
    return worker


def generate(worker: ModelWorker, slots: Sequence[int]) -> list[list[int]]:
    """Greedy tokens of three rows in a batch, the first prompt's chunk alone, the last's beside a decode."""
    plans = PlanWriter(4)
    for row, slot in enumerate(slots):
        pages = range(1 + 5 * row, 6 + 5 * row)
        plans.open_row(row, PROMPTS[row], pages, adapter_slot=slot, **GREEDY)
    outputs: list[list[int]] = [[] for _ in slots]

    def step(rows: Sequence[int], **work: Any) -> None:
        for row, token in zip(rows, tokens_of(worker.launch(plans.plan(**work)).result()), strict=True):
            outputs[row].append(token)

    step([0], chunks=[(0, PROMPTS[0], True)])
    step([0, 1, 2], decodes=[(0, FEEDBACK)], chunks=[(1, PROMPTS[1], True), (2, PROMPTS[2], True)])
    for _ in range(NUM_STEPS):
        step([0, 1, 2], decodes=[(row, FEEDBACK) for row in range(3)])
    return outputs


@pytest.fixture(scope="module")
def on_cpu(paths: list[Path]) -> Iterator[ModelWorker]:
    worker = worker_with_adapters(paths, "cpu")
    yield worker
    worker.close()


@pytest.mark.parametrize("recorded", [True, False])
def test_rows_have_the_tokens_of_the_cpu(paths: list[Path], on_cpu: ModelWorker, recorded: bool) -> None:
    """In steps that are recorded, and that are not; nothing waits, and nothing is compiled late."""
    settings: dict[str, Any] = {"cuda_graph_bs": "3"} if recorded else {"disable_cuda_graph": True}
    expected = {slots: generate(on_cpu, slots) for slots in (SLOTS, (NO_ADAPTER,) * 3)}
    assert all(a != b for a, b in zip(expected[SLOTS][:2], expected[(NO_ADAPTER,) * 3][:2], strict=True))
    assert expected[SLOTS][2] == expected[(NO_ADAPTER,) * 3][2]
    with pretended_gpu() as gpu, gpu.seen_by_new_threads():
        worker = worker_with_adapters(paths, "cuda", **settings)
        compiled, replays = len(gpu.compiled), gpu.num_replays
        for slots, tokens in expected.items():
            begin = len(gpu.launches)
            assert generate(worker, slots) == tokens
            assert _launches_adapters(gpu, begin) == (slots == SLOTS)
        assert list(gpu.compiled)[compiled:] == []
        assert (gpu.num_replays > replays) == recorded
        worker.drop_adapter(1)
        assert generate(worker, SLOTS)[0] == expected[(NO_ADAPTER,) * 3][0]
        worker.close()


def _launches_adapters(gpu: PretendedGpu, begin: int) -> bool:
    return not {"_shrink", "_expand"}.isdisjoint(gpu.launches[begin:])


def test_an_adapter_comes_beside_steps_that_do_not_wait(paths: list[Path]) -> None:
    with pretended_gpu() as gpu, gpu.seen_by_new_threads():
        worker = worker_with_adapters(paths, "cuda", disable_cuda_graph=True)
        before = generate(worker, SLOTS)
        worker.load_adapter(LoadAdapter(1, AdapterRef("other", 9, "", str(paths[1]))))
        assert worker.adapters is not None
        assert len(wait_for_answers(worker.adapters, 1)) == 1
        plans = PlanWriter(4)
        plans.open_row(0, PROMPTS[0], [1, 2, 3], adapter_slot=1, **GREEDY)
        with no_waits():
            step = worker.launch(plans.plan(chunks=[(0, PROMPTS[0], True)]))
        first = tokens_of(step.result())
        again = generate(worker, (0, 0, NO_ADAPTER))
        assert [again[0][0]] == first
        assert again[0] != before[0]
        worker.close()
