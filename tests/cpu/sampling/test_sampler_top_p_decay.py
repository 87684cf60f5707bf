"""A decaying top_p: the trace of its values by the formula, what resets it, and what it leaves alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from msgspec import structs

from model_worker.device.cpu import CpuDevice
from runtime.wire.format import pack_ids
from tests.harness.models import sampling_reference as reference
from tests.harness.models.sampler_driver import (
    OnePassDevice,
    random_logits,
    reopen,
    sample,
    sampler_with,
    setup,
)
from tests.harness.row_setups import Row

VOCAB = 40
RESET_IDS = [1, 2, 3, 5, 8]


@pytest.fixture(params=[CpuDevice, OnePassDevice], ids=["looking", "one_pass"])
def device(request: pytest.FixtureRequest) -> CpuDevice:
    made: CpuDevice = request.param(threaded=False)
    return made


def age_after(output: Sequence[int], reset_ids: Sequence[int]) -> int:
    """Output tokens since the beginning or the last reset id."""
    for age, token in enumerate(reversed(output)):
        if token in reset_ids:
            return age
    return len(output)


def expected_draw(s: Row, logits: list[float], age: int, position: int) -> int:
    top_p = max(s.top_p_min, s.top_p * s.top_p_decay**age)
    return reference.draw(logits, structs.replace(s, top_p=top_p), position)


def decaying(row: int, **fields: object) -> Row:
    settings = {"top_p": 0.97, "top_p_decay": 0.8, "top_p_min": 0.15, "top_p_reset_ids": pack_ids(RESET_IDS)}
    return setup(row, seed=row, **{**settings, **fields})


def test_top_p_follows_the_formula_and_begins_again_after_a_reset_id(device: CpuDevice) -> None:
    """The host sees no token in between; half way every row is retracted and begins again at its age."""
    rows = {
        0: decaying(0),
        1: decaying(1, top_p=1.0),
        2: decaying(2, top_p_reset_ids=b""),
        3: decaying(3, top_p_min=0.0, temperature=1.5),
        4: decaying(4, top_k=20, min_p=0.001),
        5: setup(5, seed=5, top_p=0.9),
        6: setup(6, seed=6),
        7: decaying(7, top_p=0.1),
        8: decaying(8, top_p=0.3, top_p_decay=1.0, top_p_min=0.6),
    }
    sampler = sampler_with(device, *rows.values(), vocab=VOCAB)
    output: dict[int, list[int]] = {row: [] for row in rows}
    ages = set()
    for step in range(40):
        if step == 20:
            for row, tokens in output.items():
                age = age_after(tokens, RESET_IDS if rows[row].top_p_reset_ids else [])
                rows[row] = structs.replace(rows[row], top_p_age=age)
            reopen(sampler, *rows.values())
        logits = random_logits(len(rows), seed=step, vocab=VOCAB, scale=1.0)
        got = sample(sampler, logits, list(rows), [4 + step] * len(rows)).tokens.tolist()
        for (row, s), token, raw in zip(rows.items(), got, logits.double().tolist(), strict=True):
            age = age_after(output[row], RESET_IDS if s.top_p_reset_ids else [])
            if s.top_p_decay == 1.0:
                assert token == reference.draw(raw, s, 4 + step)
            else:
                assert token == expected_draw(s, raw, age, 4 + step), (row, step, age)
            ages.add(age)
            output[row].append(token)
    assert ages == set(range(40)), "some rows reset often, some never"
    assert sum(token in RESET_IDS for token in output[0]) > 2


def test_a_draw_with_decay_does_not_depend_on_the_batch(device: CpuDevice) -> None:
    setups = [
        decaying(0, top_p_age=3),
        setup(1, seed=1, top_p=0.8),
        decaying(2, top_p_age=1, top_p_decay=0.5),
        setup(3, seed=3, top_k=5),
        setup(4, temperature=0.0, top_p_decay=0.5),
    ]
    logits = random_logits(len(setups), vocab=VOCAB, scale=1.0)
    together = sample(sampler_with(device, *setups, vocab=VOCAB), logits, range(5), [9] * 5).tokens.tolist()
    alone = [
        sample(sampler_with(device, s, vocab=VOCAB), logits[i : i + 1], [i], [9]).tokens.item()
        for i, s in enumerate(setups)
    ]
    assert together == alone


def test_a_new_tenant_of_a_row_begins_at_its_own_age_with_its_own_reset_ids(device: CpuDevice) -> None:
    sampler = sampler_with(device, decaying(0, top_p_reset_ids=pack_ids(range(VOCAB))), vocab=VOCAB)
    flat = random_logits(1, vocab=VOCAB, scale=0.01)
    for position in range(5):
        sample(sampler, flat, [0], [position])
    s = decaying(0, top_p=1.0, top_p_decay=0.01, top_p_min=0.0, top_p_reset_ids=b"")
    reopen(sampler, s)
    tokens = [sample(sampler, flat, [0], [position]).tokens.item() for position in range(8)]
    raw = flat[0].double().tolist()
    assert tokens == [expected_draw(s, raw, age, age) for age in range(8)]
    assert set(tokens[1:]) == {max(range(VOCAB), key=lambda token: raw[token])}
    reopen(sampler, setup(0, seed=0, top_p=1.0))
    plain = [sample(sampler, flat, [0], [position]).tokens.item() for position in range(8)]
    assert plain == [reference.draw(raw, setup(0, seed=0), position) for position in range(8)]


def test_a_top_p_that_has_decayed_to_nothing_still_leaves_the_most_likely_id(device: CpuDevice) -> None:
    s = decaying(0, top_p_decay=1e-3, top_p_min=0.0, top_p_reset_ids=b"", top_p_age=10_000)
    logits = random_logits(1, vocab=VOCAB)
    got = sample(sampler_with(device, structs.replace(s, num_logprobs=1), vocab=VOCAB), logits, [0], [4])
    assert got.tokens.item() == int(logits.argmax())
    assert got.logprobs is not None
    assert math.isfinite(got.logprobs.chosen.item())
