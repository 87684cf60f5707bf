"""ForwardProgram: the recorded forward gives the same bits, and what cannot be recorded is not."""

from __future__ import annotations

import ctypes
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from msgspec import structs
from torch import Tensor

from model_worker.device import make_device
from model_worker.kernels.native.operators import Combine, NativeTakeRows
from model_worker.kernels.native.program import GAP, NotRecordable, Program
from model_worker.loading.loader import load_model
from model_worker.memory.kv_pool import MHATokenToKVPool
from model_worker.models.feed_forward import GatedMLP
from model_worker.models.transformer import CausalLM
from model_worker.ops.native_ops import NativeOps
from model_worker.ops.torch_ops import TorchOps
from model_worker.quant.base import QuantMethod
from model_worker.quant.int8 import Int8
from model_worker.quant.unquantized import UNQUANTIZED
from model_worker.runner.build_runner import build_runner
from model_worker.runner.model_runner import ModelRunner
from model_worker.runner.recording.forward_program import ForwardProgram
from model_worker.runner.recording.selection import record_steps
from model_worker.runner.step_output import ForwardOutput
from runtime.base.cpu_isa import CpuIsa, usable_isas
from runtime.checkpoint.model_config import ModelConfig
from runtime.settings.config import DEMO_MODEL
from runtime.wire.format import pack_ids, unpack_ids
from runtime.wire.plan import BatchPlan
from tests.harness.models.model_registry import FAMILIES
from tests.harness.models.native import NATIVE_ISAS, native_kernels, needs_compiler
from tests.harness.models.plans import FEEDBACK, PlanWriter, Wanted

pytestmark = needs_compiler

PAGES_PER_ROW = 12
NUM_ROWS = 6
PAGE_SIZE = 16
ROOT = Path(__file__).resolve().parents[3]
IDS = torch.randint(1, 4096, (NUM_ROWS, 150), generator=torch.Generator().manual_seed(1)).tolist()


def _runner(
    change: Callable[[CausalLM], None] = lambda _: None,
    quant: QuantMethod = UNQUANTIZED,
    *,
    isa: CpuIsa | None = None,
    dtype: torch.dtype = torch.bfloat16,
    records_steps: bool = True,
) -> ModelRunner:
    config = ModelConfig.from_path(Path(DEMO_MODEL))
    model = load_model(Path(DEMO_MODEL), config, dtype, "cpu", quant=quant)
    return _runner_of(model, config, change, isa=isa, records_steps=records_steps)


def _runner_of(
    model: CausalLM,
    config: ModelConfig,
    change: Callable[[CausalLM], None] = lambda _: None,
    *,
    isa: CpuIsa | None = None,
    records_steps: bool = True,
) -> ModelRunner:
    kernels = native_kernels(isa)
    ops = NativeOps(kernels)
    model.bind(ops)
    change(model)
    pool = MHATokenToKVPool(
        NUM_ROWS * PAGES_PER_ROW,
        PAGE_SIZE,
        config.num_layers,
        config.num_kv_heads,
        config.head_dim,
        model.lm_head.dtype,
        "cpu",
    )
    for layer in range(config.num_layers):
        for buffer in pool.layer(layer):
            buffer.zero_()  # what is in no page that was written is compared, too
    return build_runner(
        model,
        pool,
        ops,
        make_device("cpu", threaded=False),
        max_rows=NUM_ROWS,
        max_len=PAGES_PER_ROW * PAGE_SIZE,
        vocab_size=config.vocab_size,
        records_steps=records_steps,
    )


def _all_logits(runner: ModelRunner) -> list[Tensor]:
    """Return the logits of a run with everything a step may be: chunks beside decodes, tokens only the device
    knows, prompt positions, and steps that sample nothing.
    """
    plans = PlanWriter(PAGE_SIZE)
    for row in range(NUM_ROWS):
        pages = range(1 + row * PAGES_PER_ROW, 1 + (row + 1) * PAGES_PER_ROW)
        plans.open_row(row, IDS[row], list(pages), temperature=0.0)
    steps = [
        plans.plan(chunks=[(0, IDS[0][:5], False)]),
        plans.plan(chunks=[(0, IDS[0][5:7], True), (1, IDS[1][:1], False)]),
        plans.plan([(0, FEEDBACK)], [(1, IDS[1][1:5], True)], wanted={1: Wanted(IDS[1], 0, 2)}),
        plans.plan([(0, FEEDBACK), (1, FEEDBACK)], [(2, IDS[2], True), (3, IDS[3][:3], True)]),
        *(plans.plan([(row, FEEDBACK) for row in range(4)]) for _ in range(3)),
    ]
    logits = []
    for plan in steps:
        forward = runner.forward(plan)
        assert forward.logits is not None
        logits.append(forward.logits.clone())
        output = runner.sample(forward, {})
        if output.prompt is not None and output.prompt.logprobs is not None:
            logits.append(output.prompt.logprobs.chosen)
    return logits


def _recording(records: list[BatchPlan], runner: ModelRunner) -> None:
    """Note the plans that the program runs, each in memory that is NaN until a kernel has written it."""
    program = runner._recording
    assert isinstance(program, ForwardProgram)
    run = program.run

    def note(plan: BatchPlan) -> ForwardOutput:
        records.append(plan)
        arena = program._program._arena
        ctypes.memset(arena.data_ptr(), 0xFF, arena.nbytes)
        return run(plan)

    program.run = note  # type: ignore[method-assign]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("quant", [UNQUANTIZED, Int8(stored=False)], ids=["unquantized", "int8"])
@pytest.mark.parametrize("isa", usable_isas())
def test_a_recorded_forward_gives_the_same_bits(isa: CpuIsa, quant: QuantMethod, dtype: torch.dtype) -> None:
    plain, recorded = (_runner(quant=quant, isa=isa, dtype=dtype) for _ in range(2))
    recorded.warm_up()
    by_program: list[BatchPlan] = []
    _recording(by_program, recorded)
    expected, got = _all_logits(plain), _all_logits(recorded)
    assert len(expected) == len(got) == 8
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert [len(unpack_ids(plan.input_ids)) for plan in by_program] == [5, 3, 155, 4, 4, 4]
    assert torch.equal(plain.kv_pool.layer(0)[0][PAGE_SIZE:], recorded.kv_pool.layer(0)[0][PAGE_SIZE:])


def test_nothing_is_recorded_where_that_is_asked_for() -> None:
    """--disable-cuda-graph does so on a CPU, too; what it computes is the same."""
    runner = _runner(records_steps=False)
    runner.warm_up()
    assert runner._recording is None
    recorded = _runner()
    recorded.warm_up()
    assert recorded._recording is not None
    for own, other in zip(_all_logits(runner), _all_logits(recorded), strict=True):
        assert torch.equal(own, other)


def _torch_gate(model: CausalLM) -> None:
    for layer in model.model.layers:
        mlp = layer.mlp
        assert isinstance(mlp, GatedMLP)
        mlp._gated = TorchOps().gated(mlp.gate_up_proj.product, "silu", mlp._width)


def test_a_model_with_torch_operations_is_not_recorded_and_says_which(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner = _runner(_torch_gate)
    with caplog.at_level(logging.DEBUG, "model_worker.runner.recording.forward_program"):
        runner.warm_up()
    assert runner._recording is None
    assert any("not recorded, because it uses aten.silu" in record.getMessage() for record in caplog.records)
    assert len(_all_logits(runner)) == 8


def test_a_program_that_computes_something_else_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    kernels = native_kernels()

    def behind_its_back(module: object, inputs: object, hidden: Tensor) -> None:
        """Compute as a library of one's own could, which no recording sees."""
        if kernels.recording.tape is None:
            ctypes.memset(hidden.data_ptr(), 0, hidden.nbytes)

    def hook(model: CausalLM) -> None:
        model.model.register_forward_hook(behind_its_back)

    runner = _runner(hook)
    with caplog.at_level(logging.WARNING):
        runner.warm_up()
    assert runner._recording is None
    assert any("computes something else" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("vocab_size", [96, 97], ids=["panels", "part_of_a_panel"])
@pytest.mark.parametrize("isa", NATIVE_ISAS)
def test_every_family_is_recorded(isa: CpuIsa, architecture: str, vocab_size: int, tmp_path: Path) -> None:
    """But for the rotation that changes with the length: recording compares it with the forward, bit by bit.
    So is a head of 97 rows, which fill no panel.
    """
    for name, case in FAMILIES[architecture].cases.items():
        content = case.config.to_dict() | {"architectures": [architecture], "vocab_size": vocab_size}
        (tmp_path / "config.json").write_text(json.dumps(content))
        config = ModelConfig.from_path(tmp_path)
        model = load_model(tmp_path, config, torch.bfloat16, "cpu", "dummy")
        for weight in model.parameters():
            weight.data.normal_(std=0.2)
        runner = _runner_of(model, config, isa=isa)
        runner.warm_up()
        if name == "llama_dynamic":
            assert runner._recording is None
        else:
            assert isinstance(runner._recording, ForwardProgram)
            assert runner._recording._head is None


def test_copies_and_additions_end_a_recording() -> None:
    kernels = native_kernels()
    table, ids = torch.randn(8, 4), torch.zeros(5, dtype=torch.int64)
    take = NativeTakeRows(kernels)
    for function in (
        lambda: take(table, ids) + 1,
        lambda: take(table, ids).clone(),
        lambda: take(table, ids).t().contiguous(),
        lambda: take(table, ids).zero_(),
    ):
        with torch.inference_mode(), pytest.raises(NotRecordable):
            Program(kernels, function, [ids], num_tokens=5, num_outputs=4, num_seqs=5)
        assert kernels.recording.tape is None
    with torch.inference_mode(), pytest.raises(NotRecordable, match="3 rows"):
        Program(kernels, lambda: take(table, ids[:3]), [ids], num_tokens=5, num_outputs=4, num_seqs=5)


def test_a_recording_notes_no_call_of_another_thread() -> None:
    """Kernels are loaded once a process, and several ranks may load in it, each in a thread."""
    kernels = native_kernels()
    table, ids = torch.randn(8, 4), torch.arange(5)
    take = NativeTakeRows(kernels)
    elsewhere: list[Tensor] = []

    def recorded() -> Tensor:
        other = threading.Thread(target=lambda: elsewhere.append(take(table, ids)))
        other.start()
        other.join()
        return take(table, ids)

    with torch.inference_mode():
        program = Program(kernels, recorded, [ids], num_tokens=5, num_outputs=4, num_seqs=5)
    assert program.num_calls == 1
    assert torch.equal(elsewhere[0], table[:5])


def test_a_recorded_choice_looks_at_its_number_in_every_step() -> None:
    kernels = native_kernels()
    combine, take = Combine(kernels), NativeTakeRows(kernels)
    table, ids = torch.arange(32.0).view(8, 4), torch.zeros(5, dtype=torch.int64)
    number = torch.zeros(1, dtype=torch.int32)

    def chosen() -> Tensor:
        rows = take(table, ids)
        out = torch.empty(len(rows), 4)
        kernels.choose(
            number, lambda: combine(rows, scale=2.0, out=out), lambda: combine(rows, scale=3.0, out=out)
        )
        return out

    with torch.inference_mode():
        program = Program(kernels, chosen, [ids], num_tokens=5, num_outputs=4, num_seqs=5)
        for value, factor in ((0, 2.0), (7, 3.0), (-1, 3.0), (0, 2.0)):
            number[0] = value
            ids[:] = torch.tensor([3, 0, 2, 1, 7])
            assert torch.equal(chosen(), factor * table[ids])
            got = program.run(num_tokens=5, num_outputs=5, num_seqs=5)
            assert torch.equal(got, factor * table[ids])


def test_recording_imports_no_compiler() -> None:
    """It would be most of what a worker does until it is ready."""
    code = (
        "import sys, torch\n"
        "from model_worker.kernels.native.operators import NativeTakeRows\n"
        "from model_worker.kernels.native.program import Program\n"
        "from tests.harness.models.native import native_kernels\n"
        "kernels, table, ids = native_kernels(), torch.randn(8, 4), torch.zeros(5, dtype=torch.int64)\n"
        "take = NativeTakeRows(kernels)\n"
        "with torch.inference_mode():\n"
        "    Program(kernels, lambda: take(table, ids), [ids], num_tokens=5, num_outputs=4, num_seqs=5)\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_program_reuses_memory_only_where_nothing_needs_it() -> None:
    """A chain of rows taken from rows: each result is needed by the next call alone."""
    kernels = native_kernels()
    table = torch.arange(40.0).view(10, 4)
    ids = torch.zeros(10, dtype=torch.int64)

    def chain() -> Tensor:
        first = take(table, ids)
        second = take(first, ids)
        third = take(second, ids)
        return take(third, ids)

    take = NativeTakeRows(kernels)
    with torch.inference_mode():
        program = Program(kernels, chain, [ids], num_tokens=10, num_outputs=9, num_seqs=10)
        source = torch.tensor([3, 0, 2, 1])
        ids[:4] = source
        got = program.run(num_tokens=4, num_outputs=4, num_seqs=4).clone()
        expected = table[source][source][source][source]
    assert torch.equal(got, expected)
    assert program._arena.nbytes <= 2 * 192 + GAP


def test_a_recorded_step_draws_what_the_sampler_does() -> None:
    """Rows of all kinds that a draw is enough for; beside one with a penalty, and when masks are to come, the
    sampler does it. Each step reads the tokens of the one before on the device.
    """
    settings: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"seed": 5, "temperature": 1.5},
        {"seed": 6, "top_k": 40, "top_p": 0.9},
        {"seed": 7, "min_p": 0.01, "top_n_sigma": 1.5},
    ]
    penalty = {"seed": 8, "presence_penalty": 1.5, "history_ids": pack_ids(IDS[4][:4])}
    tokens: list[list[int]] = []
    for runner in (_runner(), _runner()):
        if tokens:
            runner.warm_up()
            assert runner._recording is not None
        plans = PlanWriter(PAGE_SIZE)
        for row in range(5):
            pages = range(1 + row * PAGES_PER_ROW, 1 + (row + 1) * PAGES_PER_ROW)
            plans.open_row(row, IDS[row], list(pages), **(settings[row] if row < 4 else penalty))
        steps = [plans.plan(chunks=[(row, IDS[row][:1], True) for row in range(4)])]
        steps += [plans.plan([(row, FEEDBACK) for row in range(4)]) for _ in range(3)]
        steps.append(structs.replace(plans.plan([(row, FEEDBACK) for row in range(4)]), defer_sampling=True))
        steps.append(plans.plan([(0, FEEDBACK)], [(4, IDS[4][:4], True)]))
        steps.append(plans.plan([(row, FEEDBACK) for row in range(5)]))
        forwards = []
        for plan in steps:
            forward = runner.forward(plan)
            forwards.append(forward.tokens is not None)
            output = runner.sample(forward, {}).to_result(plan)[0]
            tokens.append(unpack_ids(output.tokens).tolist())
    assert forwards == [True] * 4 + [False] * 3
    assert tokens[:7] == tokens[7:]
    assert len({token for step in tokens for token in step}) > 10


def test_programs_are_for_native_kernels_alone() -> None:
    runner = _runner()
    plan = PlanWriter(PAGE_SIZE).plan()
    parts = replace(runner._parts(plan), ops=TorchOps())
    assert record_steps(parts, lambda: None) is None
