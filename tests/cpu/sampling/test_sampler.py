"""Sampler: each feature against a slow reference, draws against the distribution they are drawn from."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import Tensor

from model_worker.device.cpu import CpuDevice
from model_worker.sampling.truncation import candidates, largest
from runtime.wire.format import pack_ids
from tests.harness.models import sampling_reference as reference
from tests.harness.models.native import needs_compiler
from tests.harness.models.sampler_driver import (
    CPU,
    VOCAB,
    NativeDevice,
    OnePassDevice,
    bitmask,
    random_logits,
    reopen,
    sample,
    sampler_with,
    setup,
)
from tests.harness.row_setups import Row


@pytest.fixture(
    params=[CpuDevice, OnePassDevice, pytest.param(NativeDevice, marks=needs_compiler)],
    ids=["looking", "one_pass", "native"],
)
def device(request: pytest.FixtureRequest) -> CpuDevice:
    made: CpuDevice = request.param(threaded=False)
    return made


# -- draws -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "truncation",
    [{}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 20, "top_p": 0.9, "min_p": 0.02}],
    ids=["whole", "top_k", "top_p", "min_p", "all"],
)
def test_draws_follow_softmax_of_what_is_left(device: CpuDevice, truncation: dict[str, Any]) -> None:
    """Chi-square of 20,000 draws. The seed is fixed; for another one, false alarm below 1e-6."""
    vocab, draws = 32, 20_000
    logits = random_logits(1, seed=3, vocab=vocab, scale=1.5)
    temperature = 1.3
    sampler = sampler_with(device, setup(seed=11, temperature=temperature, **truncation), vocab=vocab)
    tokens = torch.cat(
        [
            sample(sampler, logits.expand(1000, -1), [0] * 1000, range(at, at + 1000)).tokens
            for at in range(0, draws, 1000)
        ]
    )
    scaled = (logits[0].double() / temperature).tolist()
    options = {"top_k": -1, "top_p": 1.0, "min_p": 0.0, **truncation}
    kept = reference.kept_ids(scaled, **options)
    seen = torch.bincount(tokens, minlength=vocab).double()
    assert set(seen.nonzero()[:, 0].tolist()) <= set(kept)
    expected = torch.softmax(torch.tensor(scaled, dtype=torch.float64)[kept], 0) * draws
    statistic = float(((seen[kept] - expected) ** 2 / expected).sum())
    freedom = len(kept) - 1
    # Wilson-Hilferty: (X / f)^(1/3) is nearly normal; 5 deviations are exceeded with probability 3e-7.
    limit = freedom * (1 - 2 / (9 * freedom) + 5 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit


def test_truncated_draws_equal_the_slow_reference(device: CpuDevice) -> None:
    setups = [
        setup(0, seed=1, temperature=0.7, top_k=5),
        setup(1, seed=2, temperature=1.0, top_p=0.5),
        setup(2, seed=3, temperature=1.5, min_p=0.1),
        setup(3, seed=4, temperature=0.9, top_k=300, top_p=0.95, min_p=0.001),
        setup(4, seed=(1 << 62) + 5, temperature=2.0),
        setup(5, seed=6, temperature=2.0, top_p=0.999),
        setup(6, seed=7, temperature=1.0, top_k=VOCAB * 2),
        setup(7, seed=8, temperature=1.0, top_k=1),
        setup(8, seed=9, temperature=1.7, top_n_sigma=1.5),
        setup(9, seed=10, temperature=0.8, top_n_sigma=2.5, top_p=0.9),
        setup(10, seed=11, temperature=5.0, top_n_sigma=1.0, top_k=30, top_p=0.8, min_p=0.5),
    ]
    sampler = sampler_with(device, *setups)
    for position in range(4, 12):
        logits = random_logits(len(setups), seed=position)
        got = sample(sampler, logits, range(len(setups)), [position] * len(setups)).tokens.tolist()
        expected = [
            reference.draw(row.tolist(), s, position) for row, s in zip(logits.double(), setups, strict=True)
        ]
        assert got == expected


def test_boundary_ties_of_top_k_go_to_the_lowest_ids() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [500, 900]] = 1.0
    logits[0, 3] = -0.0
    values, ids = largest(logits, 5)
    assert ids.tolist() == [[500, 900, 0, 1, 2]]
    assert values.tolist() == [[1.0, 1.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("one_pass", [False, True])
def test_top_p_keeps_the_same_ids_whatever_the_width_of_the_search(one_pass: bool) -> None:
    vocab = 5000
    logits = random_logits(8, vocab=vocab, scale=1.0)
    top_p = torch.tensor([1e-6, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 1.0])
    values, ids = candidates(
        logits,
        torch.zeros(8, dtype=torch.int64),
        top_p,
        torch.full((8,), -math.inf),
        max_top_k=0,
        one_pass=one_pass,
    )
    for row, p, value, token in zip(logits.double(), top_p.tolist(), values, ids, strict=True):
        assert token[value > -math.inf].tolist() == reference.kept_ids(row.tolist(), -1, p, 0.0)


def test_a_draw_does_not_depend_on_the_batch(device: CpuDevice) -> None:
    setups = [
        setup(
            row,
            seed=row * 7919,
            temperature=[0.0, 0.5, 1.0, 2.0][row % 4],
            top_k=[-1, 50, -1][row % 3],
            top_p=[1.0, 1.0, 0.9, 0.6, 1.0][row % 5],
            min_p=[0.0, 0.02][row % 2],
            repetition_penalty=[1.0, 1.0, 1.2][row // 4 % 3],
            history_ids=pack_ids([1, 2, 3, 4, 5, 5]),
            no_repeat_ngram=[0, 0, 2, 3][row // 2 % 4],
            bad_words=[(), (pack_ids([5, 900]), pack_ids([30 + row]))][row // 3 % 2],
            allowed_ids=[b"", b"", pack_ids(range(row, 700))][row // 5 % 3],
            min_len=[0, 90][row // 6 % 2],
            stop_ids=[b"", pack_ids([7])][row // 6 % 2],
            top_p_decay=[1.0, 0.5][row // 7 % 2],
        )
        for row in range(48)
    ]
    logits = random_logits(48, scale=4.0)
    together = sample(sampler_with(device, *setups), logits, range(48), range(10, 58)).tokens.tolist()
    alone = [
        int(sample(sampler_with(device, s), logits[i : i + 1], [i], [10 + i]).tokens)
        for i, s in enumerate(setups)
    ]
    assert together == alone
    assert len(set(together)) > 30


def test_seed_and_position_each_change_the_draw(device: CpuDevice) -> None:
    """32 draws from about 1,000 nearly equal ids: that all agree by chance has probability below 1e-90."""
    logits = torch.zeros(1, VOCAB).expand(32, -1)
    sampler = sampler_with(device, *[setup(row, seed=row) for row in range(32)])
    assert len(set(sample(sampler, logits, range(32), [5] * 32).tokens.tolist())) > 20
    assert len(set(sample(sampler, logits, [0] * 32, range(32)).tokens.tolist())) > 20
    first = sample(sampler, logits, range(32), [5] * 32).tokens
    assert torch.equal(first, sample(sampler, logits, range(32), [5] * 32).tokens)


# -- greedy, penalties, bias, min tokens, masks ----------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 9e-6])
def test_greedy_takes_the_largest_logit_and_the_lowest_id_of_equals(temperature: float) -> None:
    logits = torch.zeros(3, VOCAB)
    logits[0, [700, 30]] = 2.0
    logits[2, VOCAB - 1] = 1.0
    sampler = sampler_with(CPU, *[setup(row, temperature=temperature) for row in range(3)])
    assert sample(sampler, logits, range(3), [4] * 3).tokens.tolist() == [30, 0, VOCAB - 1]


def penalise_reference(logits: Tensor, prompt: list[int], output: list[int], s: Row) -> Tensor:
    out = logits.double().clone()
    for token in set(prompt + output):
        out[token] = (
            out[token] / s.repetition_penalty if out[token] > 0 else out[token] * s.repetition_penalty
        )
    for token in set(output):
        out[token] -= s.frequency_penalty * output.count(token) + s.presence_penalty
    return out


def test_penalties_equal_the_slow_reference_over_a_generation(device: CpuDevice) -> None:
    """Also that a row that was retracted half way, and is seeded again with what it had, goes on the same."""
    vocab = 40
    prompt = [1, 2, 2, 39]
    s = setup(
        3,
        temperature=0.0,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.6,
        history_ids=pack_ids(prompt),
    )
    sampler = sampler_with(device, s, setup(5, temperature=0.0), vocab=vocab)
    output: list[int] = []
    for step in range(30):
        if step == 15:
            sampler = sampler_with(
                device,
                setup(5, temperature=0.0),
                structs.replace(s, history_ids=pack_ids(prompt + output)),
                vocab=vocab,
            )
        logits = random_logits(2, seed=step % 3, vocab=vocab)
        plain, penalised = sample(sampler, logits, [5, 3], [4 + step] * 2).tokens.tolist()
        assert plain == int(logits[0].argmax())
        assert penalised == int(penalise_reference(logits[1], prompt, output, s).argmax())
        output.append(penalised)
    assert len(set(output)) > 5


def test_a_new_tenant_of_a_row_inherits_nothing(device: CpuDevice) -> None:
    everything = setup(
        0,
        temperature=0.0,
        presence_penalty=2.0,
        history_ids=pack_ids([1, 1, 1, 1, 7]),
        bias_ids=pack_ids([8]),
        bias_values=np.array([50.0], np.float32).tobytes(),
        min_len=100,
        stop_ids=pack_ids([9]),
        num_logprobs=2,
    )
    sampler = sampler_with(device, everything)
    logits = torch.zeros(1, VOCAB)
    logits[0, [7, 9]] = torch.tensor([1.0, 3.0])
    assert sample(sampler, logits, [0], [5]).tokens.tolist() == [8]
    reopen(sampler, setup(0, temperature=0.0))
    got = sample(sampler, logits, [0], [5])
    assert got.tokens.tolist() == [9]
    assert got.logprobs is None
    reopen(sampler, setup(0, temperature=0.0, presence_penalty=2.0, history_ids=pack_ids([1] * 4)))
    logits[0, 9] = 0.0
    assert sample(sampler, logits, [0], [5]).tokens.tolist() == [7]


def test_logit_bias_is_added_before_the_temperature(device: CpuDevice) -> None:
    s = setup(
        0,
        seed=3,
        temperature=0.5,
        bias_ids=pack_ids([4, 900]),
        bias_values=np.array([5.0, -100.0], np.float32).tobytes(),
    )
    logits = random_logits(1)
    biased = logits[0].double().clone()
    biased[4] += 5.0
    biased[900] -= 100.0
    got = [int(sample(sampler_with(device, s), logits, [0], [p]).tokens) for p in range(20)]
    assert got == [reference.draw(biased.tolist(), s, p) for p in range(20)]


def test_no_stop_id_is_sampled_below_min_len(device: CpuDevice) -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, 11] = 9.0
    logits[:, 12] = 8.0
    stop = pack_ids([11, 12])
    sampler = sampler_with(
        device,
        setup(0, temperature=0.0, min_len=6, stop_ids=stop),
        setup(1, temperature=0.0, min_len=7, stop_ids=stop),
    )
    assert sample(sampler, logits, [0, 1], [5, 5]).tokens.tolist() == [0, 0]
    assert sample(sampler, logits, [0, 1], [6, 6]).tokens.tolist() == [11, 0]
    assert sample(sampler, logits, [0, 1], [7, 7]).tokens.tolist() == [11, 11]


def test_masked_ids_are_never_sampled_and_other_rows_do_not_see_the_mask(device: CpuDevice) -> None:
    allowed = [3, 64, 1001]
    mask = bitmask(allowed)
    sampler = sampler_with(device, setup(0, seed=1), setup(1, temperature=0.0), setup(2, temperature=0.0))
    logits = random_logits(3)
    seen = set()
    for position in range(60):
        drawn, greedy, free = sample(
            sampler, logits, [0, 1, 2], [position] * 3, {0: mask, 1: mask}
        ).tokens.tolist()
        seen.add(drawn)
        assert greedy == max(allowed, key=lambda t: float(logits[1, t]))
        assert free == int(logits[2].argmax())
    assert seen <= set(allowed)


def test_ids_beyond_a_short_mask_are_forbidden() -> None:
    sampler = sampler_with(CPU, setup(0, temperature=0.0))
    logits = torch.zeros(1, VOCAB)
    logits[0, 500] = 5.0
    mask = np.array([1 << 9], np.uint32).tobytes()
    assert sample(sampler, logits, [0], [4], {0: mask}).tokens.tolist() == [9]


def test_hostile_numbers_give_a_token_of_the_vocabulary(device: CpuDevice) -> None:
    """Numbers that a model or a request can produce must not end the worker."""
    logits = random_logits(6)
    logits[0] = math.nan
    logits[1, 5] = math.inf
    logits[2] = -math.inf
    logits[3, ::2] = math.nan
    # Temperature, top_k, top_p, min_p.
    settings = [
        (1.0, -1, 1.0, 0.0),
        (0.01, 5, 0.5, 0.1),
        (1.0, -1, 0.1, 0.0),
        (1.0, 3, 1.0, 1.0),
        (1e-5, -1, 1.0, 0.0),
        (0.0, 1, 1e-9, 1.0),
    ]
    bias = {
        "bias_ids": pack_ids([VOCAB, -1, 2]),
        "bias_values": np.array([1.0, 1.0, -100.0], np.float32).tobytes(),
    }
    rows = [
        setup(row, seed=row, temperature=t, top_k=k, top_p=p, min_p=m, **bias)
        for row, (t, k, p, m) in enumerate(settings)
    ]
    tokens = sample(sampler_with(device, *rows), logits, range(6), range(6)).tokens
    assert ((tokens >= 0) & (tokens < VOCAB)).all()


# -- logprobs --------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_raw_logits_of_the_rows_that_asked(device: CpuDevice) -> None:
    sampler = sampler_with(
        device,
        setup(0, seed=1, temperature=0.3, top_k=4, num_logprobs=3),
        setup(1, temperature=0.0),
        setup(2, temperature=0.0, presence_penalty=2.0, history_ids=pack_ids([1, 2, 3, 4]), num_logprobs=0),
    )
    logits = random_logits(3)
    got = sample(sampler, logits, [0, 1, 2], [9, 9, 9])
    assert got.logprobs is not None
    expected = torch.log_softmax(logits, -1)[[0, 2]]
    chosen = got.tokens[[0, 2]].unsqueeze(1)
    torch.testing.assert_close(got.logprobs.chosen, expected.gather(1, chosen)[:, 0])
    top = expected.topk(3, dim=1)
    torch.testing.assert_close(got.logprobs.top, top.values)
    assert torch.equal(got.logprobs.top_ids, top.indices.int())
    assert got.logprobs.chosen.dtype == torch.float32


def test_zero_logprobs_asked_for_gives_the_chosen_ones_alone(device: CpuDevice) -> None:
    sampler = sampler_with(device, setup(0, temperature=0.0, num_logprobs=0))
    logits = random_logits(1)
    got = sample(sampler, logits, [0], [4])
    assert got.logprobs is not None
    torch.testing.assert_close(got.logprobs.chosen, torch.log_softmax(logits, -1).amax(1))
    assert got.logprobs.top.shape == got.logprobs.top_ids.shape == (1, 0)


def test_raw_logits_come_back_for_the_rows_that_asked_whatever_is_done_to_them(device: CpuDevice) -> None:
    edits = {
        "presence_penalty": 2.0,
        "bias_ids": pack_ids([4]),
        "bias_values": np.array([50.0], np.float32).tobytes(),
        "history_ids": pack_ids([1, 2, 3, 4]),
        "bad_words": (pack_ids([5]),),
        "allowed_ids": pack_ids([4, 5, 6]),
    }
    sampler = sampler_with(
        device,
        setup(0, temperature=0.0, returns_logits=True, **edits),
        setup(1, **edits),
        setup(2, seed=3, top_p=0.5, returns_logits=True, num_logprobs=2),
    )
    logits = random_logits(3)
    got = sample(sampler, logits, [2, 1, 0], [5, 5, 5])
    assert got.logits_of.tolist() == [0, 2]
    assert got.logits is not None
    assert torch.equal(got.logits, logits[[0, 2]])
    assert sample(sampler, logits[:1], [1], [6]).logits is None


def test_a_batch_of_none_samples_nothing(device: CpuDevice) -> None:
    got = sample(sampler_with(device, setup(0)), torch.empty(0, VOCAB), [], [])
    assert got.tokens.shape == (0,)
    assert got.logprobs is None
