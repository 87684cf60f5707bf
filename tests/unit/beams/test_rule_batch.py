"""Rules asked for several searches together against those asked for each beam, while beams fork."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest

from runtime.wire.format import FloatArray, IntArray
from scheduler_proc.core.samples import RowLogprobs, Sampled, SampledLogits
from scheduler_proc.features.beam_search.rule_batch import RuleBatch, RuledSearch
from scheduler_proc.features.beam_search.score_rules import BeamTokens, NextTokens, ScoreRules

VOCAB_SIZE = 60
WIDTH = 4


def drawn_rules(rng: random.Random) -> ScoreRules:
    ids = rng.sample(range(VOCAB_SIZE), 12)
    return ScoreRules(
        rng.choice([1.0, 1.0, 1.7]),
        rng.choice([0.0, 1.0]),
        rng.choice([0.0, 0.5]),
        tuple((each, rng.uniform(-6, 6)) for each in ids[: rng.choice([0, 0, 4])]),
        tuple(ids[: rng.choice([0, 0, 3, 12])]),
        rng.choice([0, 0, 1, 2, 3]),
    )


def sampled_of(rng: random.Random, num_top: int) -> Sampled:
    """Logits of which many are equal, and logprobs of the likeliest that differ from them in the last bit."""
    logits = np.array([rng.choice([0.0, 1.0, rng.gauss(0, 3)]) for _ in range(VOCAB_SIZE)], np.float32)
    wide = logits.astype(np.float64)
    logprobs = (wide - np.log(np.exp(wide).sum())).astype(np.float32)
    ids = np.argsort(-logprobs, kind="stable")[None, :num_top].astype(np.int32)
    return Sampled(
        [0],
        RowLogprobs(logprobs[ids[:, 0]], ids, logprobs[ids]),
        logits=[SampledLogits(0, 1, VOCAB_SIZE, logits.tobytes())],
    )


@dataclass
class Search:
    """A search in the batch, and the tokens of its beams."""

    ruled: RuledSearch
    num_prompt: int
    beams: list[list[int]]
    num_top: int

    def tokens(self, beam: int) -> IntArray:
        return np.array(self.beams[beam], np.int32)

    def alone(self, results: list[Sampled]) -> list[NextTokens]:
        each = []
        for beam, sampled in enumerate(results):
            assert sampled.logprobs is not None
            logits: FloatArray = np.frombuffer(sampled.logits[0].frame, np.float32)
            top = sampled.logprobs.top_ids[0], sampled.logprobs.top[0]
            top = top[0][: self.num_top], top[1][: self.num_top]
            rules, most = self.ruled.rules, self.ruled.num_best
            each.append(rules.best(self.tokens(beam), self.num_prompt, logits, top, most))
        return each


def begun(rng: random.Random) -> Search:
    prompt = [rng.randrange(VOCAB_SIZE + 3) for _ in range(rng.randrange(1, 12))]  # some are virtual tokens
    num_best, num_top = rng.choice([(4, 8), (6, 20), (6, VOCAB_SIZE), (80, VOCAB_SIZE)])
    search = Search(RuledSearch(drawn_rules(rng), num_best, num_top, WIDTH), len(prompt), [prompt], num_top)
    search.ruled.begin(np.array(prompt, np.int32))
    return search


def rows_of(tokens: BeamTokens, beam: int) -> list[tuple[int, float, float]]:
    own = tokens.of(beam)
    return sorted(zip(own.ids.tolist(), own.scores.tolist(), own.logprobs.tolist(), strict=True))


@pytest.mark.parametrize(
    "seed", [*range(15), *(pytest.param(n, marks=pytest.mark.full) for n in range(15, 60))]
)
def test_what_is_asked_together_is_what_each_beam_gets_alone(seed: int) -> None:
    rng, batch = random.Random(seed), RuleBatch()
    searches = [begun(rng) for _ in range(3)]
    for _ in range(12):
        asked = []
        for search in rng.sample(searches, rng.randrange(1, 4)):
            results = [sampled_of(rng, rng.choice([search.num_top, VOCAB_SIZE])) for _ in search.beams]
            batch.ask(search.ruled, results, search.tokens)
            asked.append((search, results))
        rng.shuffle(asked)
        for search, results in asked:
            found, alone = batch.answer(search.ruled), BeamTokens.joined(search.alone(results))
            for beam in range(len(search.beams)):
                assert rows_of(found, beam) == rows_of(alone, beam), search.ruled.rules
            pairs = [(rng.randrange(len(search.beams)), rng.randrange(6)) for _ in range(rng.randrange(1, 5))]
            search.beams = [[*search.beams[parent], token] for parent, token in pairs]
            search.ruled.follow(pairs)
