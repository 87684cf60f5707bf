"""Rows sampled at several places, by each device's kernels: tokens and reports are those of one at a time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model_worker.device.cpu import CpuDevice
from model_worker.sampling.columns import SampleRows
from model_worker.sampling.guesses import NO_GUESS, places_that_count, rows_that_end
from model_worker.sampling.sampler import Sampler
from runtime.wire.format import pack_ids
from tests.harness.models.native import needs_compiler
from tests.harness.models.sampler_driver import (
    CPU,
    INTERPRETED,
    NativeDevice,
    OnePassDevice,
    bitmask,
    random_logits,
    sampler_with,
    setup,
    who,
)
from tests.harness.models.speculation import SAMPLINGS
from tests.harness.pretended_gpu.interpreter import patched_once, shuffled_programs

VOCAB = 203
NUM_PROMPT = 4
NUM_TOKENS = 7
NOBODY = 64
DEVICES = [
    pytest.param(CPU, id="torch"),
    pytest.param(OnePassDevice(threaded=False), id="one_pass"),
    pytest.param(NativeDevice(threaded=False), id="native", marks=needs_compiler),
    pytest.param(INTERPRETED, id="triton"),
]
LAST_ROWS = {"num_logprobs": 2, "returns_logits": True}


@pytest.fixture(scope="module", autouse=True)
def interpreter() -> Iterator[None]:
    """Triton's interpreter as in tests/cpu/triton: it takes a fraction of the time."""
    with patched_once(), shuffled_programs():
        yield


def _sampler(device: CpuDevice, names: tuple[str, ...]) -> Sampler:
    rows = [
        setup(
            row,
            seed=row,
            history_ids=pack_ids([1, 2, 3, row]),
            **_asks(row, SAMPLINGS[name]),
        )
        for row, name in enumerate(names)
    ]
    return sampler_with(device, *rows, vocab=VOCAB)


def _asks(row: int, sampling: dict[str, Any]) -> dict[str, Any]:
    return sampling | ([{}, {"num_logprobs": 1}, LAST_ROWS][row % 3])


def _logits(row: int, last_token: int, num_output: int) -> Tensor:
    """Logits as a model's: a function of the tokens so far, here of the newest."""
    return random_logits(1, seed=1000 * last_token + 10 * num_output + row, vocab=VOCAB)[0]


def allowed_behind(last_token: int, num_output: int) -> range:
    return range((last_token + num_output) % 5, VOCAB, 5)


Report = tuple[int, tuple[float, list[int]] | None, Tensor | None]
"""A token, its logprob with the likeliest ids, its logits."""


class Driven:
    """Rows whose tokens are sampled step by step."""

    def __init__(self, device: CpuDevice, names: tuple[str, ...], guided: tuple[int, ...] = ()) -> None:
        """`guided`: rows with a mask for each token, by the token before it."""
        self._sampler = _sampler(device, names)
        self._guided = guided
        self.outputs: list[list[Report]] = [[] for _ in names]

    def last(self, row: int) -> int:
        return self.outputs[row][-1][0] if self.outputs[row] else row

    def _masks(self, row: int, guesses: list[int]) -> list[bytes]:
        """The masks before and behind guesses, up to the first that may not come."""
        num_output, masks = len(self.outputs[row]), list[bytes]()
        for before, guess in zip([self.last(row), *guesses], [*guesses, NO_GUESS], strict=True):
            allowed = allowed_behind(before, num_output + len(masks))
            masks.append(bitmask(allowed, VOCAB))
            if guess not in allowed:
                break
        return masks

    def step(self, guesses: dict[int, list[int]]) -> None:
        """Sample rows with their guesses; an empty list is one token."""
        rows, positions, behind, logits = [], [], [], []
        for row, own in guesses.items():
            num_output = len(self.outputs[row])
            for i, (before, guess) in enumerate(zip([self.last(row), *own], [*own, NO_GUESS], strict=True)):
                rows.append(row)
                positions.append(NUM_PROMPT + num_output + i)
                behind.append(guess)
                logits.append(_logits(row, before, num_output + i))
        plain = who(rows, positions)
        places = np.array(behind, np.int64)
        has_guesses = any(guesses.values())
        masks = {row: self._masks(row, own) for row, own in guesses.items() if row in self._guided}
        whose = SampleRows(
            plain.rows,
            plain.positions,
            plain.rows_host,
            plain.positions_host,
            places if has_guesses else None,
        )
        with torch.inference_mode():
            sampled = self._sampler.sample(torch.stack(logits), whose, masks)
        tokens = sampled.tokens.numpy()
        kept = places_that_count(tokens, places)
        if has_guesses:
            ends = rows_that_end(places, whose.rows, sampled.tokens, NOBODY, CPU).tolist()
        for place in np.flatnonzero(kept).tolist():
            logprob = raw = None
            if sampled.logprobs is not None and place in sampled.logprobs_of:
                at = sampled.logprobs_of.tolist().index(place)
                logprob = sampled.logprobs.chosen[at].item(), sampled.logprobs.top_ids[at, :1].tolist()
            if sampled.logits is not None and place in sampled.logits_of:
                raw = sampled.logits[sampled.logits_of.tolist().index(place)]
            self.outputs[rows[place]].append((tokens.item(place), logprob, raw))
        if has_guesses:
            last = {row: self.last(row) for row in guesses}
            assert {row: tokens.item(i) for i, row in enumerate(ends) if row != NOBODY} == last


def _assert_same(own: list[Report], other: list[Report]) -> None:
    for (token, logprob, raw), (other_token, other_logprob, other_raw) in zip(own, other, strict=True):
        assert token == other_token
        assert logprob == other_logprob
        assert (raw is None) == (other_raw is None)
        assert raw is None or other_raw is None or torch.equal(raw, other_raw)


SETTINGS = [tuple(SAMPLINGS)[at : at + 4] for at in range(0, len(SAMPLINGS), 4)]
MIXED = ("greedy", "top_p", "min_tokens", "bias")


@pytest.mark.parametrize("guided", [(), (1, 3)], ids=["free", "guided"])
@pytest.mark.parametrize("device", DEVICES)
def test_places_are_sampled_as_one_at_a_time(device: CpuDevice, guided: tuple[int, ...]) -> None:
    """Each place of a guided row has the mask behind the guess before it. What is interpreted: see below."""
    some = SETTINGS if device is not INTERPRETED else SETTINGS[bool(guided) :: 2]
    check_places(device, guided, [MIXED, *some])


@pytest.mark.full
@pytest.mark.parametrize("guided", [(), (1, 3)], ids=["free", "guided"])
def test_interpreted_places_of_all_settings(guided: tuple[int, ...]) -> None:
    """Each is free or guided above, by turns: the interpreter takes twice as long for all."""
    check_places(INTERPRETED, guided, [MIXED, *SETTINGS])


def check_places(device: CpuDevice, guided: tuple[int, ...], settings: list[tuple[str, ...]]) -> None:
    draw = random.Random(4)
    num_varied = 0
    for names in settings:
        alone = Driven(device, names, guided)
        for _ in range(NUM_TOKENS):
            alone.step({row: [] for row in range(4)})
        true = [[token for token, *_ in output] for output in alone.outputs]
        together = Driven(device, names, guided)
        while unfinished := [row for row in range(4) if len(together.outputs[row]) < NUM_TOKENS]:
            guesses = {}
            for row in draw.sample(unfinished, draw.randint(1, len(unfinished))):
                done = len(together.outputs[row])
                known = true[row][done : min(done + draw.randint(0, 4), NUM_TOKENS - 1)]
                guesses[row] = [t if draw.random() < 0.8 else (t + 1) % VOCAB for t in known]
            together.step(guesses)
        for own, other in zip(together.outputs, alone.outputs, strict=True):
            _assert_same(own, other)
        for row in guided:
            ids = [row, *true[row]]
            assert all(ids[at + 1] in allowed_behind(ids[at], at) for at in range(NUM_TOKENS))
        num_varied += any(len(set(tokens)) > 1 for tokens in true)
    assert num_varied == len(settings)
