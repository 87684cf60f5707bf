"""The kernels beside a draw (penalties, bias, minimum length, logprobs) against the torch sampler."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from model_worker.kernels.triton.top_logprobs import BLOCK, top_logprobs
from model_worker.sampling.capabilities.logit_bias import LogitBias
from model_worker.sampling.capabilities.penalties import Penalties
from model_worker.sampling.capabilities.prohibitions import Prohibitions
from model_worker.sampling.logprobs import logprobs_of, ranks_of
from model_worker.sampling.triton.logit_edits import count_tokens, forbid_masked
from runtime.wire.format import pack_ids
from tests.harness.models.mask_cases import VOCABS, mask_case
from tests.harness.models.sampler_driver import (
    CPU,
    INTERPRETED,
    capability_of,
    random_logits,
    reopen,
    sampler_with,
    setup,
    step_of,
    who,
)

VOCAB = 2500  # one block and a part of one


def edited(bias: list[tuple[int, float]], row: int, **fields: object) -> object:
    return setup(
        row,
        bias_ids=pack_ids([token for token, _ in bias]),
        bias_values=np.array([value for _, value in bias], np.float32).tobytes(),
        history_ids=pack_ids([1, 2, 2, 7, 2400, 2400, 9]),
        **fields,
    )


SETUPS = [
    edited([], 4, repetition_penalty=1.3),
    edited([(0, 2.5), (VOCAB - 1, -100.0), (2049, 0.25)], 2),
    edited([], 9),
    edited([(7, 1.0)], 0, presence_penalty=0.4, frequency_penalty=-1.1, repetition_penalty=0.7),
    edited([(n, n / 64) for n in range(300)], 1, frequency_penalty=2.0),
]
ROWS = [9, 4, 0, 2, 1]


def test_edits_are_those_of_the_torch_sampler() -> None:
    """Rows with each edit, with several and with none in one batch, and after other tenants."""
    before = [edited([(3, 9.0)], row, presence_penalty=9.0) for row in ROWS]
    by_torch, by_kernel = (sampler_with(device, *before, vocab=VOCAB) for device in (CPU, INTERPRETED))
    whose = who(ROWS, [20] * 5)
    expected, got = random_logits(5, vocab=VOCAB), random_logits(5, vocab=VOCAB)
    raw = got.clone()
    with torch.inference_mode():
        for sampler, logits in ((by_torch, expected), (by_kernel, got)):
            reopen(sampler, *SETUPS)
            for kind in (Penalties, LogitBias):
                capability_of(sampler, kind).apply(logits, step_of(sampler, whose))
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)
    assert torch.equal(got[0], raw[0])
    assert all(not torch.equal(got[i], raw[i]) for i in range(1, 5))


def test_only_rows_with_a_penalty_count_their_tokens() -> None:
    sampler = sampler_with(CPU, *SETUPS, vocab=VOCAB)
    counts = capability_of(sampler, Penalties).counts
    before = counts.clone()
    tokens = torch.tensor([5, 2400, 0, 1, VOCAB - 1])
    count_tokens(counts, torch.tensor(ROWS), tokens, sampler._columns)
    changed = (counts - before).nonzero().tolist()
    assert changed == [[0, 0], [1, VOCAB - 1], [4, 2400]]
    assert (counts - before).sum() == 3


def test_stop_ids_are_forbidden_below_the_minimum_length() -> None:
    logits = random_logits(4)
    whose = who([0, 1, 2, 3], [10, 5, 29, 98])
    expected = logits.clone()
    expected[2, :200] = -math.inf
    expected[3, 1] = -math.inf
    for device in (CPU, INTERPRETED):
        sampler = sampler_with(device, *(setup(row, stop_ids=pack_ids([1]), min_len=99) for row in range(4)))
        reopen(
            sampler,
            setup(0, stop_ids=pack_ids([3, 500, 3]), min_len=10),
            setup(1),
            setup(2, stop_ids=pack_ids(list(range(200))), min_len=30),
        )
        got = logits.clone()
        with torch.inference_mode():
            capability_of(sampler, Prohibitions).apply(got, step_of(sampler, whose))
        assert torch.equal(got, expected)


@pytest.mark.parametrize(("vocab_size", "num_top"), [(1, 1), (7, 7), (2 * BLOCK + 5, 20), (BLOCK, 0)])
def test_logprobs_of_the_chosen_and_of_the_likeliest(vocab_size: int, num_top: int) -> None:
    """Among them equal logits, minus infinity and a whole block of it."""
    logits = (random_logits(3, vocab=vocab_size, scale=6.0) / 2).round() * 2
    if vocab_size > BLOCK:
        logits[1, :BLOCK] = -math.inf
        logits[2, 3::2] = -math.inf
    tokens = logits.argmax(dim=1)
    tokens[0] = vocab_size // 2
    assert_logprobs(logits, tokens, num_top)


def assert_logprobs(logits: Tensor, tokens: Tensor, num_top: int) -> None:
    expected = logprobs_of(logits, tokens, num_top)
    chosen, ids, top, none = top_logprobs(logits, tokens, num_top)
    assert none is None
    torch.testing.assert_close(chosen, expected.chosen, atol=2e-5, rtol=1e-6)
    assert torch.equal(ids, expected.top_ids)
    torch.testing.assert_close(top, expected.top, atol=2e-5, rtol=1e-6)
    *also, places = top_logprobs(logits, tokens, num_top, ranks=True)
    assert places is not None
    assert torch.equal(places, ranks_of(logits, tokens))
    for one, other in zip(also, (chosen, ids, top), strict=True):
        assert torch.equal(one, other)


def test_no_rows_have_no_logprobs() -> None:
    chosen, ids, top, places = top_logprobs(
        torch.empty(0, 9), torch.empty(0, dtype=torch.int64), 3, ranks=True
    )
    assert places is not None
    assert (chosen.shape, ids.shape, top.shape, places.shape) == ((0,), (0, 3), (0, 3), (0,))


@pytest.mark.parametrize("vocab", VOCABS)
def test_masks_are_those_of_torch(vocab: int) -> None:
    logits, staged, expected = mask_case(vocab)
    forbid_masked(logits, *staged)
    torch.testing.assert_close(logits, expected, atol=0.0, rtol=0.0, equal_nan=True)
