"""--deterministic: bfloat16 logits are the same bits alone, in a batch, in chunks, and after a retraction."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model_worker.attention import cpu_native
from model_worker.device import make_device
from model_worker.load_worker import load_worker
from model_worker.runner.model_runner import ModelRunner
from runtime.base.cpu_isa import CpuIsa, usable_isas
from runtime.base.errors import ConfigError
from runtime.settings.config import DEMO_MODEL, RuntimeConfig
from tests.harness.models.native import native_kernels, needs_compiler
from tests.harness.models.plans import PlanWriter, save_tiny_llama

pytestmark = needs_compiler

NUM_ROWS = 5
PAGES_PER_ROW = 10
PAGE_SIZE = 16
LENGTH = 140
IDS = torch.randint(1, 4096, (NUM_ROWS, LENGTH), generator=torch.Generator().manual_seed(2)).tolist()


def _load(**settings: object) -> ModelRunner:
    config: dict[str, Any] = {
        "model": str(DEMO_MODEL),
        "dtype": "bfloat16",
        "device": "cpu",
        "deterministic": True,
        "context_length": PAGES_PER_ROW * PAGE_SIZE,
        "max_running_requests": NUM_ROWS,
        "max_total_tokens": NUM_ROWS * PAGES_PER_ROW * PAGE_SIZE,
        **settings,
    }
    return load_worker(RuntimeConfig(**config), make_device("cpu", threaded=False), lambda: None)._runner


class _Rows:
    """Computes the rows' tokens step by step, and keeps each row's logits by position."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._plans = PlanWriter(PAGE_SIZE)
        self.logits: list[dict[int, Tensor]] = [{} for _ in range(NUM_ROWS)]
        self.done = [0] * NUM_ROWS

    def open(self, row: int) -> None:
        first = 1 + row * PAGES_PER_ROW
        self._plans.open_row(row, IDS[row], list(range(first, first + PAGES_PER_ROW)), temperature=0.0)
        self.done[row] = 0

    def step(self, work: dict[int, int]) -> None:
        """Compute the next so many tokens of each row."""
        parts = {row: IDS[row][self.done[row] : self.done[row] + n] for row, n in work.items()}
        decodes = [(row, part[0]) for row, part in parts.items() if len(part) == 1]
        chunks = [(row, part, True) for row, part in parts.items() if len(part) > 1]
        logits = self._runner.forward(self._plans.plan(decodes, chunks)).logits
        assert logits is not None
        rows = [row for row, *_ in decodes] + [row for row, *_ in chunks]
        for row, own in zip(rows, logits, strict=True):
            self.done[row] += len(parts[row])
            self.logits[row][self.done[row]] = own.clone()


@pytest.mark.parametrize("isa", usable_isas())
def test_logits_are_the_same_bits_whatever_the_batch_the_chunks_and_the_retractions(
    isa: CpuIsa, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = native_kernels(isa)
    monkeypatch.setattr(cpu_native, "load_kernels", lambda *_, **__: kernels)
    runner = _load()
    alone = _Rows(runner)
    for row in range(NUM_ROWS):  # token by token, no other row there
        alone.open(row)
        for _ in range(LENGTH):
            alone.step({row: 1})
    draw = random.Random(7)
    mixed = _Rows(runner)
    for row in range(NUM_ROWS):
        mixed.open(row)
    num_retractions = num_compared = 0
    while any(done < LENGTH for done in mixed.done):
        unfinished = [row for row in range(NUM_ROWS) if mixed.done[row] < LENGTH]
        chosen = draw.sample(unfinished, draw.randint(1, len(unfinished)))
        mixed.step({row: min(draw.choice([1, 1, 1, 2, 7, 40]), LENGTH - mixed.done[row]) for row in chosen})
        victim = draw.choice(chosen)
        if mixed.done[victim] > 60 and num_retractions < 4:  # its KV is lost; computed again in chunks
            num_retractions += 1
            mixed.open(victim)
    for row in range(NUM_ROWS):
        for position, logits in mixed.logits[row].items():
            num_compared += 1
            assert torch.equal(logits, alone.logits[row][position]), (row, position)
    assert num_retractions == 4
    assert num_compared > 100


def test_what_the_worker_cannot_promise_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="deterministic: needs the C\\+\\+ attention"):
        _load(attention_backend="torch_native")
    save_tiny_llama(tmp_path, intermediate_size=81)  # rows of an odd number of bfloat16 have no kernel
    with pytest.raises(ConfigError, match=r"deterministic: model.layers.0.mlp.down_proj of this model"):
        _load(model=str(tmp_path), context_length=64)
    save_tiny_llama(tmp_path)  # but 97 tokens do, which fill no panel
    _load(model=str(tmp_path), context_length=64)
