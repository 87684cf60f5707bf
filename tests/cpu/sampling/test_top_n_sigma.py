"""Top-n-sigma by a formula in float64: over a row's finite logits, after penalties, bias and masks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import Tensor

from model_worker.device.cpu import CpuDevice
from model_worker.sampling.truncation import within_sigmas
from runtime.wire.format import pack_ids
from tests.harness.models import sampling_reference as reference
from tests.harness.models.native import needs_compiler
from tests.harness.models.sampler_driver import (
    LeastDevice,
    NativeDevice,
    OnePassDevice,
    bitmask,
    random_logits,
    sample,
    sampler_with,
    setup,
)
from tests.harness.row_setups import Row

VOCAB = 203
HISTORY = [1, 2, 2, 60, 4, 4, 4, 100]
EDITS: dict[str, dict[str, object]] = {
    "plain": {},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.6},
    "bias": {
        "bias_ids": pack_ids([4, 150, 60]),
        "bias_values": np.array([-90.0, 6.0, 2.5], np.float32).tobytes(),
    },
    "allowed ids": {"allowed_ids": pack_ids(range(0, VOCAB, 3))},
    "all of them": {
        "presence_penalty": 2.0,
        "bias_ids": pack_ids([9, 12]),
        "bias_values": np.array([100.0, 3.0], np.float32).tobytes(),
        "allowed_ids": pack_ids(range(0, VOCAB, 3)),
        "bad_words": (pack_ids([9]),),
    },
}
CUTS = ({"top_n_sigma": 0.4}, {"top_n_sigma": 1.0}, {"top_n_sigma": 2.0, "top_p": 0.8, "top_k": 9})


@pytest.fixture(
    params=[
        CpuDevice,
        OnePassDevice,
        pytest.param(NativeDevice, marks=needs_compiler),
        pytest.param(LeastDevice, marks=needs_compiler),
    ],
    ids=["looking", "one_pass", "native", "least"],
)
def device(request: pytest.FixtureRequest) -> CpuDevice:
    made: CpuDevice = request.param(threaded=False)
    return made


def edited(logits: Tensor, s: Row, mask: Sequence[int]) -> np.ndarray:
    """Logits [V] with all that comes before the temperature, in float64."""
    x = logits.double().numpy().copy()
    output = HISTORY[s.num_prompt :]
    for token in set(HISTORY):
        x[token] = x[token] / s.repetition_penalty if x[token] > 0 else x[token] * s.repetition_penalty
    for token in set(output):
        x[token] -= s.presence_penalty + s.frequency_penalty * output.count(token)
    np.add.at(x, np.frombuffer(s.bias_ids, np.int32), np.frombuffer(s.bias_values, np.float32))
    allowed = np.frombuffer(s.allowed_ids, np.int32) if s.allowed_ids else np.arange(VOCAB)
    for word in s.bad_words:
        x[np.frombuffer(word, np.int32)] = -math.inf
    x[np.setdiff1d(np.arange(VOCAB), np.intersect1d(allowed, mask))] = -math.inf
    return x


@pytest.mark.parametrize("edit", EDITS)
def test_what_is_drawn_is_within_the_formula_s_bounds(device: CpuDevice, edit: str) -> None:
    """At a temperature that would draw anything else, too; beside a row that is not cut. The bounds are those
    of the logits: a temperature divides distance and deviation alike.
    """
    rows = [
        setup(row, seed=row, temperature=8.0, history_ids=pack_ids(HISTORY), **EDITS[edit], **cut)
        for row, cut in enumerate([*CUTS, {}])
    ]
    masked = [i for i in range(VOCAB) if i % 7]
    sampler = sampler_with(device, *rows, vocab=VOCAB)
    drawn: list[set[int]] = [set() for _ in rows]
    for position in range(8, 40):
        # Penalties look at the output, to which every step adds a token.
        sampler = sampler_with(device, *rows, vocab=VOCAB) if "penalty" in str(EDITS[edit]) else sampler
        logits = random_logits(len(rows), vocab=VOCAB)
        masks = {row: bitmask(masked, VOCAB) for row in range(len(rows))}
        tokens = sample(sampler, logits, range(len(rows)), [position] * len(rows), masks).tokens.tolist()
        for token, s, row in zip(tokens, rows, logits, strict=True):
            x = edited(row, s, masked)
            assert token == reference.draw(x.tolist(), s, position)
            drawn[s.row].add(token)
            if s.top_n_sigma:
                assert x[token] >= x.max() - s.top_n_sigma * x[np.isfinite(x)].std()
    assert len(drawn[0]) < len(drawn[1]) < len(drawn[3])


def test_a_row_that_is_greedy_or_has_no_sigma_is_not_cut(device: CpuDevice) -> None:
    logits = random_logits(2, vocab=VOCAB)
    greedy = setup(0, temperature=0.0, top_n_sigma=0.1)
    sampler = sampler_with(device, greedy, setup(1, seed=3, temperature=30.0), vocab=VOCAB)
    positions = range(64)
    assert set(sample(sampler, logits[:1].expand(64, -1), [0] * 64, positions).tokens.tolist()) == {
        int(logits[0].argmax())
    }
    assert len(set(sample(sampler, logits[1:].expand(64, -1), [1] * 64, positions).tokens.tolist())) > 40


def test_rows_of_one_value_of_one_id_and_of_none(device: CpuDevice) -> None:
    """Without a deviation all equals stay; a row with nothing left gives id 0, as it does without."""
    logits = torch.zeros(3, VOCAB)
    logits[1] = logits[2] = -math.inf
    logits[1, 77] = 2.0
    rows = [setup(row, seed=row, top_n_sigma=0.01) for row in range(3)]
    plain = [structs.replace(s, top_n_sigma=0.0) for s in rows]
    for positions in ([5, 6, 7], [8, 9, 10]):
        got, expected = (
            sample(sampler_with(device, *each, vocab=VOCAB), logits, range(3), positions).tokens
            for each in (rows, plain)
        )
        assert torch.equal(got, expected)


@pytest.mark.parametrize(("scale", "shift"), [(1e-3, 0.0), (1.0, 0.0), (50.0, 1e4), (1e15, 0.0)])
def test_the_bound_is_that_of_numpy(scale: float, shift: float) -> None:
    logits = random_logits(6, vocab=5000, scale=scale) + shift
    logits[1, ::2] = -math.inf
    logits[2, 7] = math.inf
    num_sigmas = torch.tensor([0.5, 1.0, 2.0, 3.0, 0.0, 1e6])
    got = within_sigmas(logits, num_sigmas)
    for row, kept, n in zip(logits, got, num_sigmas.tolist(), strict=True):
        expected = torch.zeros(5000, dtype=torch.bool)
        expected[reference.within_sigmas(row.tolist(), n)] = True
        # At the bound itself float32 rounds.
        assert ((kept > -math.inf) != (expected & (row > -math.inf))).sum() <= 1
