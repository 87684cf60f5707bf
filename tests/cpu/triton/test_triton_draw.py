"""The draw kernels against the torch sampler's own functions: same noise, same candidates, same tokens."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from model_worker.kernels.triton.draw import draw
from model_worker.sampling.noise import perturbed
from model_worker.sampling.truncation import candidates
from tests.cpu.sampler_driver import CPU, random_logits, sampler_with, setup, who

VOCAB_SIZE = 5003


def random_rows(num_rows: int, seed: int, *, steps: float = 0.0) -> Tensor:
    """Logits; with `steps` they are multiples of it, so that many are equal."""
    logits = 4.0 * torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    return (logits / steps).round() * steps if steps else logits


def columns(num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """(temperature, seeds, positions)."""
    generator = torch.Generator().manual_seed(num_rows)
    return (
        0.5 + torch.rand(num_rows, generator=generator),
        torch.randint(0, (1 << 63) - 1, (num_rows,), generator=generator),
        torch.randint(0, 1 << 20, (num_rows,), generator=generator),
    )


def reference(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, left: Tensor | None = None
) -> Tensor:
    x = logits / temperature[:, None] if left is None else left
    return perturbed(x, seeds, positions, prune=False).argmax(dim=1)


def test_whole_vocabulary_draws_take_the_tokens_of_the_torch_sampler() -> None:
    logits, (temperature, seeds, positions) = random_rows(6, 1), columns(6)
    greedy = torch.tensor([False] * 6)
    tokens = draw(logits, temperature, seeds, positions, greedy)
    assert torch.equal(tokens, reference(logits, temperature, seeds, positions))


def test_greedy_rows_take_the_largest_logit_and_of_equals_the_lowest_id() -> None:
    logits, (temperature, seeds, positions) = random_rows(4, 2), columns(4)
    logits[1, [4000, 17, 2500]] = 99.0
    tokens = draw(logits, temperature, seeds, positions, torch.tensor([True, True, False, True]))
    assert tokens[[0, 1, 3]].tolist() == logits.argmax(dim=1)[[0, 1, 3]].tolist()
    assert tokens[1] == 17


@pytest.mark.parametrize("steps", [0.0, 1.5])
@pytest.mark.parametrize("seed", [3, 4])
def test_truncated_draws_take_the_tokens_of_the_torch_sampler(seed: int, steps: float) -> None:
    """All kinds of rows in one launch; with `steps` the borders lie among equal logits."""
    top_k = torch.tensor([1, 50, 0, 0, 700, 3, 0, 10**6])
    top_p = torch.tensor([1.0, 1.0, 0.9, 0.3, 0.5, 0.999, 1.0, 1e-6])
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.2, 0.0])
    gap = torch.where(min_p > 0, min_p.log(), -math.inf)
    num_rows = len(top_k)
    logits, (temperature, seeds, positions) = random_rows(num_rows, seed, steps=steps), columns(num_rows)
    logits[:, 100:110] = -math.inf
    x = logits / temperature[:, None]
    values, ids = candidates(x, top_k, top_p, gap, max_top_k=int(top_k.max()), one_pass=True)
    left = torch.full_like(x, -math.inf).scatter_(1, ids, values)
    expected = reference(logits, temperature, seeds, positions, left)
    greedy = torch.zeros(num_rows, dtype=torch.bool)
    tokens = draw(logits, temperature, seeds, positions, greedy, top_k=top_k, top_p=top_p, min_logit_gap=gap)
    assert tokens.tolist() == expected.tolist()


def test_no_rows() -> None:
    none = torch.empty(0)
    assert draw(torch.empty(0, 8), none, none.long(), none.long(), none.bool()).shape == (0,)


def test_the_sampler_draws_the_same_by_kernel_and_by_torch() -> None:
    kinds: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 1.3, "top_k": 7},
        {"top_p": 0.6},
        {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
        {"min_p": 0.1},
        {"top_p": 0.9, "top_p_decay": 0.5, "top_p_min": 0.1, "top_p_age": 2},
    ]
    rows = list(range(len(kinds)))
    setups = [setup(row, seed=row + 5, **kind) for row, kind in enumerate(kinds)]
    sampler = sampler_with(CPU, *setups)
    logits, whose = random_logits(len(kinds)), who(rows, [30 + row for row in rows])
    features = sampler._columns.features[whose.rows_host]
    expected = sampler._draw(logits.clone(), whose, features)
    assert sampler._draw_by_kernel(logits.clone(), whose, features).tolist() == expected.tolist()
    plain = [0, 1]
    some = who(plain, [3, 4])
    features = sampler._columns.features[some.rows_host]
    expected = sampler._draw(logits[plain], some, features)
    assert sampler._draw_by_kernel(logits[plain], some, features).tolist() == expected.tolist()
