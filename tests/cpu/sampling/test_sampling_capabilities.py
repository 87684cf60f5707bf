"""The hooks of a sampling capability: when they are called and for whom; a row in the table is enough."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor

from model_worker.sampling import sampler as sampler_module
from model_worker.sampling.capabilities.base import SamplerContext, SamplingCapability
from model_worker.sampling.capabilities.logit_bias import LogitBias
from model_worker.sampling.capabilities.table import CAPABILITIES
from model_worker.sampling.sampler import Sampler
from model_worker.sampling.step import SamplingStep, StepSample
from runtime.sampling.features import LOGITS, MIN_LEN
from runtime.wire.format import pack_ids
from runtime.wire.plan import RowSetup
from tests.harness.models.sampler_driver import CPU, MAX_LEN, MAX_ROWS, VOCAB, random_logits, sample, setup
from tests.harness.sources import ROOT

MARKED = LOGITS  # each bit has a meaning; with this one, no other capability acts
Calls = list[tuple[Any, ...]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Calls of a capability of ours behind the others; it makes rows with MARKED sample id 3."""
    seen: Calls = []

    class Marked(SamplingCapability):
        bits = remembered = MARKED

        def __init__(self, context: SamplerContext) -> None:
            super().__init__(context)
            assert (context.max_rows, context.max_len, context.vocab_size) == (MAX_ROWS, MAX_LEN, VOCAB)

        def open_row(self, setup: RowSetup) -> None:
            seen.append(("open", setup.row))

        def apply(self, logits: Tensor, step: SamplingStep) -> None:
            marked = step.rows_with(MARKED)
            seen.append(("apply", marked.rows.tolist(), marked.positions_host.tolist()))
            logits[marked.at, 3] = 1e4

        def remember(self, step: SamplingStep, sampled: StepSample) -> None:
            seen.append(("remember", sampled.tokens[step.rows_with(MARKED).at].tolist()))

        def close_row(self, row: int) -> None:
            seen.append(("close", row))

    monkeypatch.setattr(sampler_module, "CAPABILITIES", (*CAPABILITIES, Marked))
    return seen


def marked(row: int) -> RowSetup:
    made = setup(row, temperature=0.0).setup()
    return structs.replace(made, features=made.features | MARKED)


def new_sampler() -> Sampler:
    return Sampler(CPU, max_rows=MAX_ROWS, max_len=MAX_LEN, vocab_size=VOCAB)


def test_a_capability_acts_for_its_rows_alone(calls: Calls) -> None:
    sampler = new_sampler()
    sampler.open_rows([setup(0, temperature=0.0).setup(), marked(5), marked(2)])
    tokens = sample(sampler, random_logits(3), [5, 0, 2], [9, 7, 8]).tokens
    assert (tokens == 3).tolist() == [True, False, True]
    sample(sampler, random_logits(1), [0], [8])
    sampler.open_rows([setup(5).setup(), marked(0)])
    assert calls == [
        ("open", 5),
        ("open", 2),
        ("apply", [5, 2], [9, 8]),
        ("remember", [3, 3]),
        ("close", 5),
        ("open", 0),
    ]


def test_each_capability_has_bits_of_its_own() -> None:
    taken = 0
    for capability in CAPABILITIES:
        assert capability.bits
        assert not capability.bits & taken
        taken |= capability.bits


def test_a_plain_row_finds_nothing_of_the_last_tenant_and_writes_nothing() -> None:
    """Kernels that look at all rows of a step find the tables of a plain row empty."""
    sampler = new_sampler()
    bias = next(each for each in sampler._capabilities if isinstance(each, LogitBias))
    plain = setup(4).setup()
    sampler.open_rows([plain])
    assert bias._entries.values.numel() == 0
    values = torch.tensor([2.0]).numpy().tobytes()
    sampler.open_rows([setup(4, bias_ids=pack_ids([7]), bias_values=values).setup()])
    assert (bias._entries.values[4] >= 0).any()
    sampler.open_rows([plain])
    assert (bias._entries.values < 0).all()


def test_stop_ids_that_are_all_of_the_vocabulary_forbid_nothing() -> None:
    sampler = new_sampler()
    all_ids = pack_ids(range(VOCAB))
    sampler.open_rows([setup(0, temperature=0.0, stop_ids=all_ids, min_len=99).setup()])
    assert not sampler._columns.features.item(0) & MIN_LEN
    logits = random_logits(1)
    assert sample(sampler, logits, [0], [5]).tokens.item() == int(logits.argmax())


def test_the_sampler_names_no_capability() -> None:
    tree = ast.parse((ROOT / "model_worker/sampling/sampler.py").read_text())
    imported = {
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    of_capabilities = {name for name in imported if name.startswith("model_worker.sampling.capabilities")}
    bits = {name for name in imported if name.startswith("runtime.sampling.features")}
    package = "model_worker.sampling.capabilities"
    assert of_capabilities == {f"{package}.base.SamplerContext", f"{package}.table.CAPABILITIES"}
    assert bits == {"runtime.sampling.features.DRAWABLE", "runtime.sampling.features.TRUNCATES"}
