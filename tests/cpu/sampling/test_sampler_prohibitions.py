"""Ids that may not be sampled: bad words and n-grams against transformers, allowed ids, and what yields."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import Tensor
from transformers import NoBadWordsLogitsProcessor, NoRepeatNGramLogitsProcessor

from model_worker.device.cpu import CpuDevice
from model_worker.sampling.capabilities.prohibitions import Prohibitions
from model_worker.sampling.sampler import Sampler
from runtime.wire.format import pack_ids
from tests.harness.models import sampling_reference as reference
from tests.harness.models.sampler_driver import (
    CPU,
    MAX_ROWS,
    VOCAB,
    OnePassDevice,
    bitmask,
    capability_of,
    random_logits,
    reopen,
    sample,
    sampler_with,
    setup,
    step_of,
    who,
)
from tests.harness.row_setups import Row

SMALL = 7  # so few ids that random text repeats itself

Words = list[list[int]]


@pytest.fixture(params=[CpuDevice, OnePassDevice], ids=["looking", "one_pass"])
def device(request: pytest.FixtureRequest) -> CpuDevice:
    made: CpuDevice = request.param(threaded=False)
    return made


def packed(words: Words) -> tuple[bytes, ...]:
    return tuple(pack_ids(word) for word in words)


def random_words(rng: random.Random) -> Words:
    """Draw words of one to four ids, none of them the empty beginning of all."""
    words = {tuple(rng.randrange(SMALL) for _ in range(rng.randint(1, 4))) for _ in range(rng.randint(1, 6))}
    return [list(word) for word in words]


def random_setup(row: int, rng: random.Random) -> tuple[Row, Words]:
    """n-grams, bad words or both, for a prompt of 0 to 30 tokens."""
    prompt = [rng.randrange(SMALL) for _ in range(rng.randrange(31))]
    words = random_words(rng) if rng.random() < 0.7 else []
    size = rng.randint(1, 5) if rng.random() < 0.7 or not words else 0
    made = setup(
        row,
        temperature=0.0,
        bad_words=packed(words),
        no_repeat_ngram=size,
        history_ids=pack_ids(prompt),
    )
    return structs.replace(made, num_prompt=len(prompt)), words


def as_transformers_does(logits: Tensor, context: Sequence[int], s: Row, words: Words) -> Tensor:
    """logits [V] after its processors; as they were where nothing would be left."""
    scores = logits.clone().unsqueeze(0)
    ids = torch.tensor([context], dtype=torch.int64)
    if s.no_repeat_ngram:
        scores = NoRepeatNGramLogitsProcessor(s.no_repeat_ngram)(ids, scores)
    if words:
        scores = NoBadWordsLogitsProcessor(words)(ids, scores)
    return logits if bool((scores == -math.inf).all()) else scores[0]


@pytest.mark.parametrize("seed", range(4))
def test_ngrams_and_bad_words_forbid_what_transformers_forbids(seed: int) -> None:
    """All ids of a row, for rows of many lengths and settings in one batch."""
    rng = random.Random(seed)
    made = [random_setup(row, rng) for row in range(MAX_ROWS)]
    rng.shuffle(made)
    sampler = sampler_with(CPU, *[s for s, _ in made], vocab=SMALL)
    rows = who([s.row for s, _ in made], [s.num_prompt for s, _ in made])
    logits = random_logits(MAX_ROWS, seed=seed, vocab=SMALL)
    got = logits.clone()
    capability_of(sampler, Prohibitions).apply(got, step_of(sampler, rows))
    for (s, words), before, after in zip(made, logits, got, strict=True):
        context = np.frombuffer(s.history_ids, np.int32).tolist()
        expected = as_transformers_does(before, context, s, words)
        assert torch.equal(after, expected), (s, words, context)


@pytest.mark.parametrize("seed", range(2))
def test_what_is_forbidden_follows_the_sampled_tokens_over_a_generation(device: CpuDevice, seed: int) -> None:
    """The host never sees a token. Half way some rows are retracted, others get new tenants."""
    rng = random.Random(100 + seed)
    made = {row: random_setup(row, rng) for row in range(24)}
    contexts = {row: np.frombuffer(s.history_ids, np.int32).tolist() for row, (s, _) in made.items()}
    sampler = sampler_with(device, *[s for s, _ in made.values()], setup(40, temperature=0.0), vocab=SMALL)
    for step in range(40):
        if step == 20:
            for row in range(0, 24, 2):
                s, words = made[row] if row % 4 else random_setup(row, rng)
                if row % 4:
                    s = structs.replace(s, history_ids=pack_ids(contexts[row]))
                else:
                    contexts[row] = np.frombuffer(s.history_ids, np.int32).tolist()
                made[row] = (s, words)
            reopen(sampler, *[made[row][0] for row in range(0, 24, 2)])
        rows = [row for row in made if rng.random() < 0.8]
        logits = random_logits(len(rows) + 1, seed=1000 * seed + step, vocab=SMALL)
        positions = [len(contexts[row]) for row in rows]
        tokens = sample(sampler, logits, [*rows, 40], [*positions, 3]).tokens.tolist()
        assert tokens.pop() == int(logits[-1].argmax())
        for row, token, before in zip(rows, tokens, logits, strict=False):
            s, words = made[row]
            assert token == int(as_transformers_does(before, contexts[row], s, words).argmax())
            contexts[row].append(token)


def test_bad_words_of_any_length_are_forbidden_and_their_beginnings_are_not(device: CpuDevice) -> None:
    sampler = sampler_with(
        device,
        setup(0, temperature=0.0, bad_words=packed([[9], [5, 6, 7]]), history_ids=pack_ids([1, 2, 3, 4])),
    )
    logits = torch.zeros(1, VOCAB)
    logits[0, [9, 7, 6]] = torch.tensor([3.0, 2.0, 1.0])
    likes_5 = logits.clone()
    likes_5[0, 5] = 8.0
    likes_6 = logits.clone()
    likes_6[0, 6] = 8.0
    tokens = [
        sample(sampler, wanted, [0], [4 + n]).tokens.item()
        for n, wanted in enumerate([logits, likes_5, likes_6, logits, logits])
    ]
    assert tokens == [7, 5, 6, 6, 7]


def test_only_allowed_ids_are_sampled_and_those_as_if_the_others_were_impossible(device: CpuDevice) -> None:
    allowed = [3, 64, 700, 1001]
    s = setup(0, seed=5, temperature=1.5, allowed_ids=pack_ids(allowed))
    greedy = setup(1, temperature=0.0, allowed_ids=pack_ids(allowed[:2]))
    sampler = sampler_with(device, s, greedy, setup(2, temperature=0.0))
    drawn = set()
    for position in range(40):
        logits = random_logits(3, seed=position)
        expected = logits[0].double().clone()
        expected[[token not in allowed for token in range(VOCAB)]] = -math.inf
        tokens = sample(sampler, logits, [0, 1, 2], [position] * 3).tokens.tolist()
        assert tokens[0] == reference.draw(expected.tolist(), s, position)
        assert tokens[1] == max(allowed[:2], key=lambda token: float(logits[1, token]))
        assert tokens[2] == int(logits[2].argmax())
        drawn.add(tokens[0])
    assert drawn == set(allowed)


def test_a_new_tenant_of_a_row_is_forbidden_nothing_by_the_old_one(device: CpuDevice) -> None:
    strict = setup(
        0,
        temperature=0.0,
        allowed_ids=pack_ids([1, 2, 3]),
        bad_words=packed([[2], [1, 3]]),
        no_repeat_ngram=2,
        history_ids=pack_ids([1, 1, 2, 1]),
    )
    sampler = sampler_with(device, strict)
    logits = torch.zeros(1, VOCAB)
    logits[0, [9, 3, 2, 1]] = torch.tensor([9.0, 3.0, 2.0, 1.0])
    # 2 is a bad word, 3 completes one, 1 would repeat "1 1": nothing is left of what is allowed.
    assert sample(sampler, logits, [0], [4]).tokens.item() == 3
    reopen(sampler, setup(0, temperature=0.0))
    assert sample(sampler, logits, [0], [4]).tokens.item() == 9
    reopen(sampler, structs.replace(strict, allowed_ids=b"", bad_words=packed([[9]]), no_repeat_ngram=0))
    assert sample(sampler, logits, [0], [4]).tokens.item() == 3
    shorter = setup(0, temperature=0.0, no_repeat_ngram=1, history_ids=pack_ids([9, 2]))
    reopen(sampler, structs.replace(shorter, num_prompt=2))
    assert sample(sampler, logits, [0], [2]).tokens.item() == 3


def test_words_of_a_row_do_not_depend_on_how_many_another_row_has_or_had(device: CpuDevice) -> None:
    """The table grows after the first row was opened, both ways; then the second row has a new tenant."""
    first = setup(0, temperature=0.0, bad_words=packed([[4, 5]]), history_ids=pack_ids([1, 2, 3, 4]))
    many = [[token] * 40 for token in range(100)]
    second = setup(1, temperature=0.0, bad_words=packed(many), history_ids=pack_ids([6] * 39))
    sampler = sampler_with(device, first)
    reopen(sampler, second)
    logits = torch.zeros(2, VOCAB)
    logits[0, 5] = logits[1, 6] = 2.0
    logits[:, 8] = 1.0
    assert sample(sampler, logits, [0, 1], [4, 39]).tokens.tolist() == [8, 8]
    assert sample(sampler, logits, [0, 1], [5, 40]).tokens.tolist() == [5, 6]
    few = structs.replace(first, bad_words=packed([[4, 5], [4, 6]]))
    reopen(sampler, few, setup(1, temperature=0.0, bad_words=packed([[8]]), history_ids=pack_ids([6] * 39)))
    logits[1, 8] = 3.0
    assert sample(sampler, logits, [0, 1], [4, 39]).tokens.tolist() == [8, 6]


def test_ids_that_the_vocabulary_lacks_are_ignored(device: CpuDevice) -> None:
    sampler = sampler_with(
        device,
        setup(
            0,
            temperature=0.0,
            allowed_ids=pack_ids([VOCAB, 7, 8, -3]),
            bad_words=packed([[VOCAB], [VOCAB + 5, 7], [8]]),
            no_repeat_ngram=2,
            history_ids=pack_ids([1, VOCAB + 5, VOCAB, 2]),
        ),
        setup(1, temperature=0.0, bad_words=packed([[VOCAB]])),
    )
    logits = random_logits(2)
    assert sample(sampler, logits, [0, 1], [4, 4]).tokens.tolist() == [7, int(logits[1].argmax())]


# -- where nothing would be left ---------------------------------------------------------------------------


def yields(device: CpuDevice, mask: Sequence[int] | None = None, **fields: object) -> list[int]:
    """Return what a row so prohibited gets, greedily and drawn; 9, 8 and 7 are its likeliest ids."""
    tokens: set[int] = set()
    logits = torch.zeros(1, SMALL + 3)
    logits[0, [9, 8, 7]] = torch.tensor([12.0, 6.0, 3.0])
    for seed, temperature in [(0, 0.0), *((seed, 0.5) for seed in range(10))]:
        for truncation in ({}, {"top_p": 0.9, "top_k": 5}):
            s = setup(0, temperature=temperature, seed=seed, num_logprobs=2, **truncation, **fields)
            sampler: Sampler = sampler_with(device, s, vocab=SMALL + 3)
            masks = None if mask is None else {0: bitmask(mask, SMALL + 3)}
            got = sample(sampler, logits, [0], [4], masks)
            assert got.logprobs is not None
            assert not got.logprobs.chosen.isnan().any()
            tokens.add(int(got.tokens))
    return sorted(tokens)


ALL_IDS = list(range(SMALL + 3))
EVERY_ID_BAD = packed([[token] for token in ALL_IDS])


@pytest.mark.parametrize(
    ("fields", "mask", "expected"),
    [
        ({"bad_words": EVERY_ID_BAD}, None, [9]),
        ({"no_repeat_ngram": 1, "history_ids": pack_ids(ALL_IDS[:4])}, [1, 2, 3], [1, 2, 3]),
        ({"stop_ids": pack_ids(ALL_IDS), "min_len": 50}, None, [9]),
        ({"allowed_ids": pack_ids([7]), "stop_ids": pack_ids([7]), "min_len": 50}, None, [7]),
        ({"allowed_ids": pack_ids([2, 5]), "bad_words": EVERY_ID_BAD}, None, [2, 5]),
        ({"stop_ids": pack_ids([8]), "min_len": 50}, [8], [8]),
        ({"bad_words": packed([[9], [8]]), "stop_ids": pack_ids([7]), "min_len": 50}, [7, 8, 9], [9]),
        ({"allowed_ids": pack_ids([4])}, [5], [0]),
    ],
    ids=[
        "bad words",
        "n-grams under a mask",
        "stop ids",
        "stop ids of allowed ids",
        "bad words of allowed ids",
        "stop ids under a mask",
        "together",
        "mask against allowed ids",
    ],
)
def test_a_row_without_any_id_left_still_gets_a_defined_one(
    device: CpuDevice, fields: dict[str, object], mask: list[int] | None, expected: list[int]
) -> None:
    """Min tokens, bad words and n-grams yield; allowed ids and mask do not, and against each other give 0."""
    assert set(yields(device, mask, **fields)) <= set(expected)
