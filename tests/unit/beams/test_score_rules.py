"""Rules of a search against a walk over the whole vocabulary, one token at a time."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from runtime.wire.format import FloatArray
from runtime.wire.sampling_params import SamplingParams
from scheduler_proc.features.beam_search import score_rules
from scheduler_proc.features.beam_search.score_rules import ScoreRules

VOCAB_SIZE = 60


def drawn(rng: random.Random) -> ScoreRules:
    ids = rng.sample(range(VOCAB_SIZE), 12)
    return ScoreRules(
        rng.choice([1.0, 1.0, 0.5, 1.7]),
        rng.choice([0.0, -1.0, 1.0]),
        rng.choice([0.0, -0.5, 0.5]),
        tuple((each, rng.uniform(-6, 6)) for each in ids[: rng.choice([0, 0, 4])]),
        tuple(ids[: rng.choice([0, 0, 3, 12])]),
        rng.choice([0, 0, 1, 2, 3]),
    )


def score(rules: ScoreRules, prompt: list[int], output: list[int], token: int, logprob: float) -> float:
    value = logprob + dict(rules.bias).get(token, 0.0)
    tokens = [*prompt, *output]
    if token in tokens:
        value = value * rules.repetition if value < 0 else value / rules.repetition
    count = output.count(token)
    value -= rules.presence * (count > 0) + rules.frequency * count
    if n := rules.ngram:
        grams = {tuple(tokens[at : at + n]) for at in range(len(tokens) - n + 1)}
        if (*tokens[len(tokens) - n + 1 :], token) in grams:
            return -math.inf
    return value if not rules.allowed or token in rules.allowed else -math.inf


def logprobs_of(logits: FloatArray) -> FloatArray:
    wide = logits.astype(np.float64)
    found: FloatArray = (wide - np.log(np.exp(wide).sum())).astype(np.float32)
    return found


def test_the_best_tokens_are_those_of_a_walk_over_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(300):
        with monkeypatch.context() as changed:
            check_best_tokens(seed, changed)


def check_best_tokens(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    rules = drawn(rng)
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 12))]
    output = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(0, 12))]
    logits = np.array([rng.gauss(0, 3) for _ in range(VOCAB_SIZE)], np.float32)
    logprobs = logprobs_of(logits)
    num_top, num_best = rng.choice([8, 20, VOCAB_SIZE]), rng.choice([2, 6])
    top_ids = np.argsort(-logprobs, kind="stable")[:num_top].astype(np.int32)
    by_guide = None
    if seed % 3:
        by_guide = np.array([rng.random() < rng.choice([0.05, 0.9]) for _ in range(VOCAB_SIZE)])
        monkeypatch.setattr(score_rules, "MAX_FEW", rng.choice([0, VOCAB_SIZE]))
    got = rules.best(
        np.array([*prompt, *output], np.int32),
        len(prompt),
        logits,
        (top_ids, logprobs[top_ids]),
        num_best,
        by_guide,
    )
    scores = {
        token: score(rules, prompt, output, token, logprobs.item(token))
        for token in range(VOCAB_SIZE)
        if by_guide is None or by_guide[token]
    }
    wanted = sorted((-value, token) for token, value in scores.items() if value > -math.inf)[:num_best]
    assert got.ids.tolist() == [token for _, token in wanted], (seed, rules)
    assert np.allclose(got.scores, [-value for value, _ in wanted], atol=1e-4), (seed, rules)
    assert np.allclose(got.logprobs, logprobs[got.ids], atol=1e-4), (seed, rules)


def test_a_request_without_rules_has_none() -> None:
    assert ScoreRules.of(SamplingParams(temperature=0.0, bad_words_ids=((1,),))) is None


def test_virtual_tokens_are_no_repetitions() -> None:
    logits = np.zeros(4, np.float32)
    top = np.arange(4, dtype=np.int32), np.full(4, math.log(0.25), np.float32)
    got = ScoreRules(repetition=2.0).best(np.array([9, 1], np.int32), 2, logits, top, 2)
    assert got.ids.tolist() == [0, 2]
