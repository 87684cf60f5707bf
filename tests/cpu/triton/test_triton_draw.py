"""The draw kernels against the torch sampler: the same tokens, whoever else is in the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from benchmarks.gpu.kernels.launches import count_launches
from model_worker.kernels.triton import truncation
from model_worker.sampling.ops.base import DrawKind
from tests.cpu.triton.draw_cases import CASES, SETUPS, logits_of
from tests.harness.models.sampler_driver import (
    CPU,
    INTERPRETED,
    random_logits,
    sampler_with,
    setup,
    step_of,
    who,
)
from tests.harness.row_setups import Row

VOCAB = 2500  # one block and a part of one
# The interpreter is NumPy, which warns of differences of infinities.
lets_numpy_warn = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def both(setups: Sequence[Row], logits: Tensor) -> tuple[list[int], list[int]]:
    """(tokens by kernel, tokens by torch)."""
    by_kernel, by_torch = (
        sampler_with(device, *setups, vocab=logits.shape[1]) for device in (INTERPRETED, CPU)
    )
    whose = who([s.row for s in setups], [30 + 7 * i for i in range(len(setups))])
    with torch.inference_mode():
        expected = by_torch.ops.draw(logits.clone(), step_of(by_torch, whose))
        return by_kernel.ops.draw(logits, step_of(by_kernel, whose)).tolist(), expected.tolist()


@lets_numpy_warn
@pytest.mark.parametrize("case", CASES)
def test_draws_take_the_tokens_of_the_torch_sampler(case: str) -> None:
    got, expected = both(SETUPS, logits_of(case, VOCAB))
    assert got == expected


@pytest.mark.parametrize("case", ["flat", "many equal", "all equal"])
def test_a_list_that_is_too_short_changes_no_token(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truncation, "CAPACITY", 16)
    got, expected = both(SETUPS, logits_of(case, VOCAB))
    assert got == expected


@pytest.mark.parametrize("vocab_size", [1, 3, 2048])
def test_vocabularies_of_any_size(vocab_size: int) -> None:
    got, expected = both(SETUPS, logits_of("peaked", vocab_size))
    assert got == expected


def test_batches_in_which_nothing_is_cut() -> None:
    logits = random_logits(4, vocab=VOCAB)
    logits[1, [2400, 17, 2100]] = 99.0
    got, expected = both([setup(row, seed=row, temperature=row % 2) for row in (5, 2, 9, 0)], logits)
    assert got == expected
    assert got[1] == 17


def test_a_top_p_that_decays_takes_the_place_of_the_rows_own() -> None:
    decaying = {"top_p": 0.9, "top_p_decay": 0.5, "top_p_min": 0.1}
    setups = [setup(row, seed=row, **decaying, top_p_age=row) for row in range(4)] + [setup(7, top_p=0.4)]
    got, expected = both(setups, random_logits(5, vocab=VOCAB))
    assert got == expected


@lets_numpy_warn
def test_what_is_no_number_still_gives_a_token() -> None:
    """Which one is not said, but the next step must find it in the vocabulary."""
    logits = logits_of("peaked", VOCAB)
    logits[:, ::2] = math.nan
    logits[::2] = math.nan
    ops = sampler_with(INTERPRETED, *SETUPS, vocab=VOCAB).ops
    rows = torch.arange(len(SETUPS))
    tokens = ops.draw_by_row(logits, rows, rows, DrawKind.TRUNCATED)
    assert ((tokens >= 0) & (tokens < VOCAB)).all()


def test_no_rows() -> None:
    ops, none = sampler_with(INTERPRETED, setup(0)).ops, torch.empty(0, dtype=torch.int64)
    assert ops.draw_by_row(torch.empty(0, 8), none, none, DrawKind.TRUNCATED).shape == (0,)


@pytest.mark.parametrize(("kind", "num_launches"), [(DrawKind.WHOLE, 2), (DrawKind.TRUNCATED, 4)])
def test_a_draw_launches_its_kernels_and_nothing_else(kind: DrawKind, num_launches: int) -> None:
    ops = sampler_with(INTERPRETED, setup(0), vocab=VOCAB).ops
    logits, rows, out, last_token = torch.empty(3, VOCAB), *torch.zeros(3, 3, dtype=torch.int64).unbind()
    with count_launches() as launches:
        ops.draw_by_row(logits, rows, rows, kind, out=out, last_token=last_token)
    assert len(launches.names) == num_launches


def test_tokens_are_stored_for_the_caller_and_by_row() -> None:
    rows, padding = [9, 4, 0], 64
    sampler = sampler_with(INTERPRETED, *(setup(row, seed=row, top_p=0.7) for row in rows))
    logits, everyone = random_logits(4), torch.tensor([*rows, padding])
    out, last_token = torch.full((4,), -1), torch.full((padding + 1,), -1)
    places = torch.arange(4)
    kind = DrawKind.TRUNCATED
    got = sampler.ops.draw_by_row(logits, everyone, places, kind, out=out, last_token=last_token)
    assert got is out
    assert last_token[everyone].tolist() == out.tolist()
    assert (last_token >= 0).sum() == 4
    assert out[3] == logits[3].argmax()  # nobody's row is greedy


def test_draws_by_row_of_torch_are_those_of_the_kernels() -> None:
    """Nobody's row among them; tokens are stored as the kernels store them."""
    rows = torch.tensor([*range(len(SETUPS)), 64])
    logits = torch.cat([logits_of("peaked", VOCAB), random_logits(1, vocab=VOCAB)])
    for kind in DrawKind:
        drawn = []
        for device in (CPU, INTERPRETED):
            ops = sampler_with(device, *SETUPS, vocab=VOCAB).ops
            out, last_token = torch.full((len(rows),), -1), torch.full((65,), -1)
            got = ops.draw_by_row(logits, rows, rows + 5, kind, out=out, last_token=last_token)
            assert got is out
            drawn.append((out.tolist(), last_token.tolist()))
        assert drawn[0] == drawn[1]
