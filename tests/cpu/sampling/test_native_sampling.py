"""The C++ sampling against torch's, token by token; test_sampler.py runs with both, too."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from model_worker.device.cpu import CpuDevice
from model_worker.sampling.capabilities.penalties import Penalties
from model_worker.sampling.logprobs import logprobs_of
from model_worker.sampling.step import StepRows
from runtime.wire.format import pack_ids
from tests.harness.models.native import needs_compiler
from tests.harness.models.sampler_driver import (
    LeastDevice,
    NativeDevice,
    capability_of,
    random_logits,
    sample,
    sampler_with,
    setup,
    step_of,
    who,
)
from tests.harness.row_setups import Row

pytestmark = needs_compiler

VOCABS = [1, 7, 63, 1003, 8000, 32_000, 151_936]


def _mixed(vocab: int) -> list[Row]:
    """Greedy rows, whole draws, and everything that a truncation may be."""
    truncations: list[dict[str, float]] = [
        {},
        {"top_k": 3},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"top_k": 50, "top_p": 0.8},
        {"top_k": vocab, "top_p": 1.0},
        {"top_k": vocab + 5, "top_p": 0.999},
        {"top_k": 400, "top_p": 0.95, "min_p": 0.01},
        {"top_p": 1e-9},
        {"top_p": 0.9, "top_p_decay": 0.8, "top_p_min": 0.3, "top_p_age": 3},
        {"top_n_sigma": 1.2},
        {"top_n_sigma": 0.5, "top_k": 40, "top_p": 0.7},
        {"top_n_sigma": 3.0, "top_p": 0.95, "min_p": 0.01},
    ]
    return [
        setup(row, seed=(row << 35) + 7, temperature=(0.5, 1.0, 1.7)[row % 3], **truncation)
        for row, truncation in enumerate(truncations)
    ] + [setup(len(truncations), temperature=0.0, top_k=3)]


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
@pytest.mark.parametrize("device", [NativeDevice, LeastDevice])
def test_native_sampling_takes_the_tokens_of_the_torch_one(
    vocab: int, scale: float, device: type[NativeDevice]
) -> None:
    """Flat logits, where each id has a chance and all are ties, and steep ones; ties on the border."""
    setups = _mixed(vocab)
    plain, native = (sampler_with(d(threaded=False), *setups, vocab=vocab) for d in (CpuDevice, device))
    for position in (0, 100_000) if vocab < 100_000 else (5,):
        logits = random_logits(len(setups), seed=position, vocab=vocab, scale=scale)
        logits[:, vocab // 2] = logits.amax(dim=1)
        logits[:, :: max(2, vocab // 50)] = logits.quantile(0.99) if vocab < 10_000 else 2.5 * scale
        expected, got = (
            sample(s, logits, range(len(setups)), [position] * len(setups)).tokens for s in (plain, native)
        )
        assert torch.equal(got, expected)


def test_ids_that_are_forbidden_are_not_drawn_however_wide_the_truncation() -> None:
    """A top-k that reaches into what has probability 0."""
    vocab = 300
    logits = torch.full((20, vocab), -math.inf)
    logits[:, [7, 200]] = 0.0
    sampler = sampler_with(NativeDevice(threaded=False), setup(0, top_k=100, seed=5), vocab=vocab)
    tokens = sample(sampler, logits, [0] * 20, range(20)).tokens
    assert set(tokens.tolist()) == {7, 200}


@pytest.mark.parametrize("vocab", VOCABS)
def test_native_logprobs_are_those_of_torch(vocab: int) -> None:
    logits = random_logits(3, vocab=vocab)
    logits[1] = 0.0  # ties alone: the lowest ids come first
    logits[2, vocab // 2 :] = -math.inf
    if vocab == 1:
        logits[2] = 1.0
    tokens = logits.argmax(dim=1)
    tokens[1] = vocab - 1  # behind all of its equals
    tokens[0] = vocab // 3
    tokens[2] = vocab - 1  # impossible, but of a vocabulary of one
    native = sampler_with(NativeDevice(threaded=False), setup(0), vocab=vocab).ops
    for num_top in (0, 1, 5, 1000):
        assert native.logprobs(logits, tokens, num_top).ranks is None
        got = native.logprobs(logits, tokens, num_top, ranks=True)
        expected = logprobs_of(logits, tokens, num_top, ranks=True)
        assert got.ranks is not None
        assert expected.ranks is not None
        assert torch.equal(got.ranks, expected.ranks)
        assert got.ranks[1] == vocab
        assert torch.equal(got.top_ids, expected.top_ids)
        torch.testing.assert_close(got.chosen, expected.chosen, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got.top, expected.top, rtol=1e-5, atol=1e-5)


def test_logprobs_of_no_distribution_are_no_numbers() -> None:
    logits = random_logits(3, vocab=70)
    logits[0, 5] = math.nan
    logits[1] = -math.inf
    logits[2, 3] = math.inf
    native = sampler_with(NativeDevice(threaded=False), setup(0), vocab=70).ops
    got = native.logprobs(logits, torch.zeros(3, dtype=torch.int64), 2)
    assert got.chosen.isnan().all()
    assert got.top.isnan().all()
    assert ((got.top_ids >= 0) & (got.top_ids < 70)).all()


@pytest.mark.parametrize("vocab", [7, 1003, 32_000])
def test_native_penalties_are_those_of_torch(vocab: int) -> None:
    """Three penalised rows stand between plain ones, over logits that their greedy neighbours see, too."""
    history = [1, 2, 2, vocab - 1, 4, 4, 4]
    setups = [
        setup(
            row,
            temperature=0.0,
            num_logprobs=0,
            repetition_penalty=(1.0, 1.3, 0.7)[row % 3],
            presence_penalty=(0.0, 0.4)[row % 3 > 0],
            frequency_penalty=(0.0, 0.6)[row % 3 > 1],
            history_ids=pack_ids(history),
        )
        for row in range(6)
    ]
    plain, native = (sampler_with(d(threaded=False), *setups, vocab=vocab) for d in (CpuDevice, NativeDevice))
    for step in range(6):
        logits = random_logits(6, seed=step % 2, vocab=vocab)
        before, expected = logits.clone(), logits.clone()
        at, whose = [1, 2, 4], who([0, 2, 1, 3, 5, 3], [7] * 6)
        for sampler, edited in ((plain, expected), (native, logits)):
            penalties = capability_of(sampler, Penalties)
            penalised = StepRows(step_of(sampler, whose), np.array(at))
            sampler.ops.penalise(edited, penalised, penalties.counts)
        torch.testing.assert_close(logits[at], expected[at], rtol=1e-6, atol=1e-6)
        assert torch.equal(logits[[0, 3, 5]], before[[0, 3, 5]])
        a, b = (sample(s, before, range(6), [7 + step] * 6) for s in (plain, native))
        assert torch.equal(a.tokens, b.tokens)
