"""The same tokens on two ranks as on one, whatever the scheduler does, and the rest of a step from rank 0.

The demo model in float32. Sums of parts round differently, and a token can change only where the two best
perturbed logits are closer than that, some 1e-5 of 15; over the 25 * 24 * 2 tokens here the chance of one is
below 1 %, and the seeds are fixed.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.settings.config import DEMO_MODEL
from runtime.wire.sampling_params import SamplingParams
from tests.cpu.models.test_parity import prompts
from tests.harness.models.native import needs_compiler
from tests.harness.models.rank_ring import RankRing
from tests.harness.ring.serving_ring import Generated, Ring, Setting

NUM_PROMPTS = 25
NUM_TOKENS = 24
TINY: dict[str, Any] = {"pool_tokens": 256, "max_rows": 8}

pytestmark = needs_compiler


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def sampling() -> list[SamplingParams]:
    """Greedy, seeded, and seeded with everything that looks at what came before."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.2, "presence_penalty": 0.3},
    ]
    return [
        SamplingParams(max_tokens=NUM_TOKENS, seed=50 + n, ignore_eos=True, **kinds[n % 3])
        for n in range(NUM_PROMPTS)
    ]


@cache
def expected() -> list[list[int]]:
    ring = Ring(DEMO_MODEL, Setting())
    try:
        return ring.generate(prompts(NUM_PROMPTS), sampling(), solo=False)
    finally:
        ring.close()


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(Setting(), id="overlap", marks=pytest.mark.full),
        pytest.param(Setting(overlap=False, radix=False, page_size=1), id="serial", marks=pytest.mark.full),
        pytest.param(Setting(chunk=16, **TINY), id="overlap-retraction"),
        pytest.param(
            Setting(chunk=16, overlap=False, page_size=1, **TINY),
            id="serial-retraction",
            marks=pytest.mark.full,
        ),
    ],
)
def test_two_ranks_make_the_tokens_of_one(setting: Setting, tmp_path: Path) -> None:
    ring = RankRing(DEMO_MODEL, setting, 2, tmp_path / "ranks")
    try:
        assert ring.generate(prompts(NUM_PROMPTS), sampling(), solo=False) == expected()
        if setting.max_rows == TINY["max_rows"]:
            assert ring.lifecycle.num_retracted > 0, "the tiny pool forced nobody to give way"
    finally:
        ring.close()


def test_logprobs_and_raw_logits_come_from_rank_0_whole(tmp_path: Path) -> None:
    asked = SamplingParams(
        max_tokens=6,
        temperature=0.0,
        seed=1,
        ignore_eos=True,
        logprobs=3,
        prompt_logprobs=2,
        return_context_logits=True,
        return_generation_logits=True,
    )

    def all_of(ring: Ring) -> list[Generated]:
        try:
            return ring.generate_each(prompts(3), [asked] * 3, solo=False)
        finally:
            ring.close()

    one = all_of(Ring(DEMO_MODEL, Setting()))
    two = all_of(RankRing(DEMO_MODEL, Setting(), 2, tmp_path / "ranks"))
    for alone, cut in zip(one, two, strict=True):
        assert alone.tokens == cut.tokens
        for name in ("context_logits", "generation_logits"):
            expected_logits = np.concatenate(getattr(alone, name))
            assert len(expected_logits) > 3
            np.testing.assert_allclose(np.concatenate(getattr(cut, name)), expected_logits, atol=2e-4)
        for name in ("logprobs", "prompt_logprobs"):
            scores, expected_scores = getattr(cut, name), getattr(alone, name)
            assert len(expected_scores.chosen) > 0
            np.testing.assert_allclose(
                np.concatenate(scores.chosen), np.concatenate(expected_scores.chosen), atol=2e-4
            )
