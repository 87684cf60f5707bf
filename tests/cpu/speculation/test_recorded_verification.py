"""Verification by the C++ kernels: recorded steps, the bits of --deterministic, and several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from model_worker.attention import cpu_native
from model_worker.device import make_device
from model_worker.distributed.group import SOLO, RankGroup
from model_worker.load_worker import load_worker
from model_worker.membership import Membership
from model_worker.runner.model_runner import ModelRunner
from model_worker.runner.recording.forward_program import ForwardProgram
from model_worker.runner.step_output import ForwardOutput
from runtime.base.cpu_isa import CpuIsa
from runtime.settings.config import DEMO_MODEL, RuntimeConfig
from runtime.wire.plan import BatchPlan
from tests.harness.models.native import NATIVE_ISAS, native_kernels, needs_compiler
from tests.harness.models.rank_threads import on_ranks
from tests.harness.models.speculation import (
    SAMPLINGS,
    Generation,
    Output,
    Proposer,
    assert_same,
    from_outputs,
    no_guesses,
    runs_on,
)

pytestmark = needs_compiler

VOCAB = 4096
NUM_ROWS = 4
PAGES_PER_ROW = 6
PAGE_SIZE = 8
NUM_TOKENS = 14
PROMPTS = torch.randint(1, VOCAB, (NUM_ROWS, 17), generator=torch.Generator().manual_seed(3)).tolist()
PLAIN: list[dict[str, Any]] = [SAMPLINGS[name] for name in ("greedy", "temperature", "top_k", "top_p")]


def _load(group: RankGroup = SOLO, **settings: object) -> ModelRunner:
    values: dict[str, Any] = {
        "model": str(DEMO_MODEL),
        "dtype": "float32",
        "device": "cpu",
        "context_length": PAGES_PER_ROW * PAGE_SIZE,
        "max_running_requests": NUM_ROWS,
        "max_total_tokens": NUM_ROWS * PAGES_PER_ROW * PAGE_SIZE,
        "page_size": PAGE_SIZE,
        **settings,
    }
    device = make_device("cpu", threaded=False)
    return load_worker(RuntimeConfig(**values), device, lambda: None, Membership.of_one_stage(group))._runner


def _pages_of(row: int) -> list[int]:
    return list(range(1 + row * PAGES_PER_ROW, 1 + (row + 1) * PAGES_PER_ROW))


def _generate(
    runner: ModelRunner, samplings: list[dict[str, Any]], propose: Proposer = no_guesses, **options: Any
) -> list[Output]:
    generation = Generation(runs_on(runner), PAGE_SIZE, PROMPTS, samplings, _pages_of)
    return generation.generate(NUM_TOKENS, propose, **options)


def _program_steps(runner: ModelRunner) -> list[bool]:
    """Note of each step that the program runs whether it has drawn the tokens, too."""
    program = runner._recording
    assert isinstance(program, ForwardProgram)
    run, drawn = program.run, list[bool]()

    def note(plan: BatchPlan) -> ForwardOutput:
        output = run(plan)
        drawn.append(output.tokens is not None)
        return output

    program.run = note  # type: ignore[method-assign]
    return drawn


def test_steps_with_guesses_are_recorded_and_draw_in_the_same_call() -> None:
    """Recordings of the whole, but where a row needs more than a draw."""
    recorded, plain = _load(), _load(disable_cuda_graph=True)
    assert plain._recording is None
    drawn = _program_steps(recorded)
    expected = _generate(plain, PLAIN)
    partly = from_outputs(expected, 5, right=0.8, vocab=VOCAB)
    for runner in (plain, recorded):
        assert_same(_generate(runner, PLAIN, partly), expected)
        perfect = _generate(runner, PLAIN, from_outputs(expected, 6, right=1.0))
        assert_same(perfect, expected)
        assert [out.num_steps for out in perfect] == [2] * NUM_ROWS
    assert drawn
    assert all(drawn)
    drawn.clear()
    kinds = [SAMPLINGS["all"], {"num_logprobs": 2}, SAMPLINGS["greedy"], {"returns_logits": True}]
    expected = _generate(plain, kinds)
    assert_same(_generate(recorded, kinds, from_outputs(expected, 5, right=0.8, vocab=VOCAB)), expected)
    assert drawn
    assert not all(drawn)


@pytest.mark.parametrize("isa", NATIVE_ISAS)
def test_deterministic_steps_give_the_same_bits(isa: CpuIsa, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = native_kernels(isa)
    monkeypatch.setattr(cpu_native, "load_kernels", lambda *_, **__: kernels)
    runner = _load(deterministic=True, dtype="bfloat16")
    kinds = [{**sampling, "num_logprobs": 2, "returns_logits": True} for sampling in PLAIN]
    expected = _generate(runner, kinds)
    for right in (1.0, 0.7, 0.0):
        for chunk in (5, 64):
            propose = from_outputs(expected, 4, right=right, vocab=VOCAB)
            got = _generate(runner, kinds, propose, chunk=chunk, seed=chunk)
            assert_same(got, expected, atol=0)


def test_a_step_with_more_places_than_are_recorded_is_computed_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("model_worker.runner.recording.forward_program.MAX_PLACES", NUM_ROWS)
    runner = _load()
    drawn = _program_steps(runner)
    expected = _generate(runner, PLAIN)
    num_recorded = len(drawn)
    got = _generate(runner, PLAIN, from_outputs(expected, 4, right=1.0))
    assert_same(got, expected)
    assert len(drawn) == num_recorded


def test_ranks_agree_on_what_counts(tmp_path: Path) -> None:
    """Only rank 0 samples; the others go on with the same last tokens."""
    kinds = [SAMPLINGS["greedy"], SAMPLINGS["all"], SAMPLINGS["top_p"], {"num_logprobs": 1}]

    def work(group: RankGroup) -> list[list[Output]]:
        runner = _load(group)
        reports = kinds if group.rank == 0 else [_without_reports(kind) for kind in kinds]
        expected = _generate(runner, reports)
        propose = from_outputs(expected, 4, right=0.7, vocab=VOCAB)
        return [expected, _generate(runner, reports, propose)]

    first, second = on_ranks(2, tmp_path / "run", work)
    for expected, got in (first, second):
        assert_same(got, expected)
    assert [out.tokens for out in first[0]] == [out.tokens for out in second[0]]


def _without_reports(sampling: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sampling.items() if name != "num_logprobs"}
