"""Tokens of verified guesses are distributed as the model says: chi-square against the analytic one."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from model_worker.attention.forward_batch import ForwardBatch
from model_worker.device import make_device
from model_worker.memory.kv_pool import MHATokenToKVPool
from model_worker.models.base import Model
from model_worker.ops.torch_ops import TorchOps
from model_worker.runner.build_runner import build_runner
from tests.harness.models.speculation import Generation, Proposer, no_guesses, runs_on

VOCAB = 6
NUM_ROWS = 60
NUM_ROUNDS = 60
NUM_TOKENS = 4
PAGE_SIZE = 8
TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(8)) * 0.6
LIMIT = 66.6
"""Chi-square of 35 degrees of freedom, exceeded once in a thousand times; seeds are the same in every run."""


class Chain:
    """A model whose next token depends on the last one alone, so that probabilities can be written down."""

    def __call__(self, batch: ForwardBatch, *_: object) -> Tensor:
        assert batch.output_indices is not None
        return batch.input_ids[batch.output_indices]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return TABLE[hidden].clone()


def _likeliest(row: int, num_output: int, draw: random.Random) -> Sequence[int]:
    """Guesses that a lossy acceptance would favour."""
    return [int(TABLE[0].argmax())] * 3


def _any(row: int, num_output: int, draw: random.Random) -> Sequence[int]:
    return [draw.randrange(VOCAB) for _ in range(draw.randint(0, 3))]


def _sequences(propose: Proposer) -> list[list[int]]:
    device = make_device("cpu", threaded=False)
    pool = MHATokenToKVPool(NUM_ROWS, PAGE_SIZE, 1, 1, 8, torch.float32, device.torch_device)
    limits: dict[str, Any] = {"max_rows": NUM_ROWS, "max_len": PAGE_SIZE, "vocab_size": VOCAB}
    runner = build_runner(cast(Model, Chain()), pool, TorchOps(), device, **limits)
    found = []
    for i in range(NUM_ROUNDS):
        samplings: list[dict[str, Any]] = [
            {"temperature": 1.0, "seed": i * NUM_ROWS + row} for row in range(NUM_ROWS)
        ]
        generation = Generation(
            runs_on(runner), PAGE_SIZE, [[0]] * NUM_ROWS, samplings, lambda row: [row + 1]
        )
        outputs = generation.generate(NUM_TOKENS, propose, seed=i)
        found += [output.tokens for output in outputs]
    return found


def _chi_square(pairs: Counter[tuple[int, int]], expected: Tensor) -> float:
    counts = torch.tensor([[pairs[a, b] for b in range(VOCAB)] for a in range(VOCAB)], dtype=torch.float64)
    wanted = expected * counts.sum()
    assert wanted.min() > 4
    return float(((counts - wanted) ** 2 / wanted).sum())


def test_each_pair_of_tokens_is_as_likely_as_the_model_says() -> None:
    step, cold = (torch.softmax(TABLE.double() / temperature, dim=1) for temperature in (1.0, 0.75))
    by_method = {propose: _sequences(propose) for propose in (no_guesses, _likeliest, _any)}
    for sequences in by_method.values():
        assert sequences == by_method[no_guesses]
        before = torch.zeros(VOCAB, dtype=torch.float64)
        before[0] = 1.0
        for at in range(NUM_TOKENS - 1):
            before = before @ step
            pairs = Counter((tokens[at], tokens[at + 1]) for tokens in sequences)
            expected = before.unsqueeze(1) * step
            assert _chi_square(pairs, expected) < LIMIT, at
            # It would notice a temperature of 0.75.
            assert _chi_square(pairs, before.unsqueeze(1) * cold) > LIMIT
