"""Steps whose rows have different adapters: each row's result is what it has alone, whatever is beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from model_worker.device import make_device
from model_worker.memory.kv_pool import MHATokenToKVPool
from model_worker.ops.base import Ops
from model_worker.ops.native_ops import NativeOps
from model_worker.ops.torch_ops import TorchOps
from model_worker.quant.int8 import Int8
from model_worker.runner.build_runner import build_runner
from model_worker.runner.recording.forward_program import ForwardProgram
from model_worker.worker import ModelWorker
from runtime.wire.plan import NO_ADAPTER
from tests.harness.models.adapted import ADAPTERS, Adapted, AdapterCase, adapted, save_adapter
from tests.harness.models.native import native_kernels, needs_compiler
from tests.harness.models.paged_forward import PagedForward
from tests.harness.models.plans import (
    FEEDBACK,
    GREEDY,
    NUM_PAGES,
    VOCAB,
    PlanWriter,
    save_tiny_llama,
    tokens_of,
)

PAGE_SIZE = 4
NUM_ADAPTERS = 8
ROWS_OF_EACH = 4
MAX_ROWS = NUM_ADAPTERS * ROWS_OF_EACH + 4
NUM_STEPS = 6
CASES = [
    AdapterCase(8, config={"lora_alpha": 16}),
    ADAPTERS["rank_16_rslora"],
    ADAPTERS["rank_64"],
    ADAPTERS["attention_alone"],
    AdapterCase(3, lambda name: name.endswith(("down_proj", "k_proj"))),
    AdapterCase(1),
    AdapterCase(17, lambda name: "mlp" in name),
    AdapterCase(32, lambda name: ".layers.0." in f".{name}", config={"layers_to_transform": 0}),
]
PROMPTS = [[3 + row, 5 + row % 7, 1 + row % 11, *range(2, 2 + row % 9)] for row in range(MAX_ROWS)]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    path = tmp_path_factory.mktemp("model")
    return path, save_tiny_llama(path)


@pytest.fixture(scope="module")
def adapters(
    checkpoint: tuple[Path, LlamaForCausalLM], tmp_path_factory: pytest.TempPathFactory
) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    for number, case in enumerate(CASES):
        save_adapter(checkpoint[1], case, folder / f"adapter-{number}", seed=number)
    return {number: folder / f"adapter-{number}" for number in range(NUM_ADAPTERS)}


@pytest.fixture(params=["torch", pytest.param("native", marks=needs_compiler)])
def ops(request: pytest.FixtureRequest) -> Ops:
    return NativeOps(native_kernels()) if request.param == "native" else TorchOps()


def slot_of(row: int) -> int:
    """Rows of one adapter lie apart; the last four are the base model's."""
    return row % NUM_ADAPTERS if row < NUM_ADAPTERS * ROWS_OF_EACH else NO_ADAPTER


def paged(served: Adapted, ops: Ops, dtype: torch.dtype) -> PagedForward:
    return PagedForward(
        served.model, PAGE_SIZE, dtype=dtype, num_rows=MAX_ROWS, max_len=64, backend=ops.attention
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("quantized", [False, True])
def test_rows_of_eight_adapters_and_the_base_have_what_they_have_alone(
    checkpoint: tuple[Path, LlamaForCausalLM],
    adapters: dict[int, Path],
    ops: Ops,
    dtype: torch.dtype,
    quantized: bool,
) -> None:
    options: dict[str, Any] = {"quant": Int8(stored=False)} if quantized else {}
    is_exact = isinstance(ops, NativeOps)
    with adapted(
        checkpoint[0], ops, dtype=dtype, max_rows=MAX_ROWS, num_slots=NUM_ADAPTERS, **options
    ) as served:
        served.load(adapters)
        served.assign([slot_of(row) for row in range(MAX_ROWS)])
        together = paged(served, ops, dtype)
        chunks = [(row, prompt[:-1]) for row, prompt in enumerate(PROMPTS)]
        of_chunks = dict(zip(_order(chunks), together.step(chunks).split(_sizes(chunks)), strict=True))
        last = together.step([(row, prompt[-1:]) for row, prompt in enumerate(PROMPTS)])
        alone = paged(served, ops, dtype)
        for row, prompt in enumerate(PROMPTS):
            for got, ids in ((of_chunks[row], prompt[:-1]), (last[row : row + 1], prompt[-1:])):
                expected = alone.step([(row, ids)])
                if is_exact and len(got) == 1:
                    assert torch.equal(got, expected), (row, ids)
                assert (got - expected).abs().max() < (2e-4 if dtype is torch.float32 else 0.5), (row, ids)


def _order(work: list[tuple[int, list[int]]]) -> list[int]:
    return [row for row, _ in sorted(work, key=lambda item: len(item[1]) > 1)]


def _sizes(work: list[tuple[int, list[int]]]) -> list[int]:
    return [len(ids) for _, ids in sorted(work, key=lambda item: len(item[1]) > 1)]


@pytest.fixture
def worker(
    checkpoint: tuple[Path, LlamaForCausalLM], adapters: dict[int, Path], ops: Ops
) -> Iterator[ModelWorker]:
    """A worker that has recorded its steps, where they are of kernels alone."""
    device = make_device("cpu", threaded=False)
    with adapted(checkpoint[0], ops, max_rows=MAX_ROWS, num_slots=NUM_ADAPTERS) as served:
        layout = served.model.kv_layout
        pool = MHATokenToKVPool(
            NUM_PAGES,
            PAGE_SIZE,
            layout.num_layers,
            layout.num_kv_heads,
            layout.head_dim,
            torch.float32,
            "cpu",
        )
        runner = build_runner(
            served.model,
            pool,
            ops,
            device,
            max_rows=MAX_ROWS,
            max_len=64,
            vocab_size=VOCAB,
            row_adapters=served.rows,
        )
        runner.warm_up()
        assert isinstance(runner._recording, ForwardProgram) == isinstance(ops, NativeOps)
        served.load(adapters)
        yield ModelWorker(runner, device, served.slots)


def generate(worker: ModelWorker, rows: list[int], slots: dict[int, int]) -> dict[int, list[int]]:
    """Greedy tokens of these rows, all in one batch."""
    writer = PlanWriter(PAGE_SIZE)
    share = NUM_PAGES // MAX_ROWS
    for row in rows:
        pages = range(1 + row * share, 1 + (row + 1) * share)
        writer.open_row(row, PROMPTS[row], pages, adapter_slot=slots[row], **GREEDY)
    plan = writer.plan(chunks=[(row, PROMPTS[row], True) for row in rows])
    outputs: dict[int, list[int]] = {row: [] for row in rows}
    for _ in range(NUM_STEPS):
        for row, token in zip(rows, tokens_of(worker.launch(plan).result()), strict=True):
            outputs[row].append(token)
        plan = writer.plan(decodes=[(row, FEEDBACK) for row in rows])
    return outputs


def test_a_recorded_step_gives_each_row_its_own_adapter(worker: ModelWorker) -> None:
    slots = {row: slot_of(row) for row in range(MAX_ROWS)}
    together = generate(worker, list(slots), slots)
    alone = {row: generate(worker, [row], slots)[row] for row in slots}
    assert together == alone
    base = generate(worker, list(slots), dict.fromkeys(slots, NO_ADAPTER))
    assert [row for row in slots if base[row] != together[row]], "adapters that change nothing"
    for row in range(NUM_ADAPTERS * ROWS_OF_EACH, MAX_ROWS):
        assert base[row] == together[row]


def test_a_dropped_slot_is_the_base_again_and_a_loaded_one_the_new_adapter(
    worker: ModelWorker, adapters: dict[int, Path]
) -> None:
    rows = [0, 1, 2, 3]
    assert worker.adapters is not None
    of_slot = {slot: generate(worker, rows, dict.fromkeys(rows, slot)) for slot in (2, 6, NO_ADAPTER)}
    assert len({str(output) for output in of_slot.values()}) == 3
    worker.drop_adapter(2)
    assert generate(worker, rows, dict.fromkeys(rows, 2)) == of_slot[NO_ADAPTER]
    Adapted(worker.adapters._model, None, worker.adapters).load({2: adapters[6]})  # type: ignore[arg-type]
    assert generate(worker, rows, dict.fromkeys(rows, 2)) == of_slot[6]
