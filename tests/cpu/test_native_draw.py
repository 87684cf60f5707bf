"""The C++ draw against the torch one, token by token; tests/cpu/test_sampler.py runs with both, too."""

from __future__ import annotations

import pytest
import torch

from model_worker.device.cpu import CpuDevice
from tests.cpu.native import needs_compiler
from tests.cpu.sampler_driver import NativeDevice, random_logits, sample, sampler_with, setup

pytestmark = needs_compiler


@pytest.mark.parametrize("vocab", [5, 63, 1003, 8000])
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
def test_the_native_draw_takes_the_tokens_of_the_torch_one(vocab: int, scale: float) -> None:
    """Greedy, whole and truncated rows in one batch; flat logits, where each id has a chance, and steep."""
    setups = [
        setup(
            row,
            seed=(row << 35) + 7,
            temperature=(0.0, 0.5, 1.0, 1.7)[row % 4],
            min_p=(0.0, 0.1)[row % 3 == 1],
            top_k=(-1, 3)[row % 8 == 5],
        )
        for row in range(12)
    ]
    plain, native = (sampler_with(d(threaded=False), *setups, vocab=vocab) for d in (CpuDevice, NativeDevice))
    for position in (0, 100_000):
        logits = random_logits(len(setups), seed=position, vocab=vocab, scale=scale)
        logits[3, vocab // 2] = logits[3].max()  # a tie
        expected, got = (
            sample(s, logits, range(len(setups)), [position] * len(setups)).tokens for s in (plain, native)
        )
        assert torch.equal(got, expected)
