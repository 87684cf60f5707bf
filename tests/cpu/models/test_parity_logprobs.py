"""Logprobs and raw logits are those of transformers, whatever the scheduler does: cache, chunks, retraction.

Requests of the demo model in float32, some with everything reported, some with parts, some with nothing, all
at once in a pool that holds about two of them. Afterwards the plain ones come again and hit the cache.
"""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest
import torch
from msgspec import structs
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from runtime.settings.config import DEMO_MODEL
from runtime.wire.format import FloatArray
from runtime.wire.sampling_params import SamplingParams
from tests.harness.ring.serving_ring import Generated, Ring, Scores, Setting

TOLERANCE = 1e-4
NUM_PROMPTS = 18
NUM_TOKENS = 20
MAX_LOGPROBS = 5
TEXT = (
    "class Counter:\n    def __init__(self, start: int = 0) -> None:\n        self.value = start\n\n"
    "    def add(self, number: int) -> int:\n        self.value += number\n        return self.value\n\n"
    "for name, path in sorted(files.items()):\n    if not path.exists():\n        raise ValueError(name)\n"
)

SETTINGS = {
    "plain": Setting(radix=False, overlap=False),
    "tiny-chunks": Setting(page_size=16, chunk=13, pool_tokens=176, max_rows=8),
    "page-1": Setting(page_size=1, chunk=32, pool_tokens=160, max_rows=8, overlap=False),
    "ample": Setting(page_size=16, chunk=64),
}


@cache
def prompts() -> list[list[int]]:
    """3 to 70 tokens; every third repeats most of the one before, every sixth all of it."""
    rng = random.Random(1)
    ids: list[int] = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")).encode(TEXT).ids
    made: list[list[int]] = []
    for n in range(NUM_PROMPTS):
        start = rng.randrange(len(ids) // 2)
        piece = ids[start : start + rng.randrange(3, 71)]
        if n % 3 == 2:
            piece = made[n - 1][:48] + ([] if n % 6 == 5 else piece[:9])
        made.append(piece)
    return made


@cache
def sampling() -> list[SamplingParams]:
    rng = random.Random(2)
    made = []
    for n in range(NUM_PROMPTS):
        s = SamplingParams(max_tokens=NUM_TOKENS, seed=n, temperature=float(n % 2), ignore_eos=True)
        if n % 4 != 0:
            s = structs.replace(
                s,
                prompt_logprobs=rng.choice([None, 0, 1, MAX_LOGPROBS]),
                logprobs=rng.choice([None, 0, 2, MAX_LOGPROBS]),
                return_context_logits=n % 5 == 1,
                return_generation_logits=n % 5 in (1, 2),
            )
            if s.prompt_logprobs is not None:
                s = structs.replace(s, prompt_logprobs_start=n % 2)
        made.append(s)
    return made


@cache
def model() -> LlamaForCausalLM:
    hf: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    return hf


@cache  # every setting has the same outputs
@torch.inference_mode()
def full_forward(ids: tuple[int, ...]) -> Tensor:
    logits: Tensor = model()(torch.tensor([ids])).logits[0]
    return logits


def check_scores(got: Scores, logits: Tensor, ids: list[int], k: int) -> None:
    """Check the scores of ids [n] that logits [n, V] are followed by. Ids of nearly equal logprobs may change
    places.
    """
    assert sum(map(len, got.chosen)) == len(ids)
    expected = logits.log_softmax(-1)
    np.testing.assert_allclose(np.concatenate(got.chosen), expected[range(len(ids)), ids], atol=TOLERANCE)
    top_ids, top = np.concatenate(got.top_ids), np.concatenate(got.top)
    assert top_ids.shape == top.shape == (len(ids), k)
    np.testing.assert_allclose(top, expected.topk(k).values, atol=TOLERANCE)
    np.testing.assert_allclose(top, expected.gather(1, torch.from_numpy(top_ids).long()), atol=TOLERANCE)


def check_logits(got: list[FloatArray], expected: Tensor) -> None:
    np.testing.assert_allclose(np.concatenate(got), expected, atol=10 * TOLERANCE)


def check(prompt: list[int], s: SamplingParams, got: Generated) -> None:
    logits = full_forward((*prompt, *got.tokens))
    end = len(prompt) - 1
    assert len(got.tokens) == NUM_TOKENS
    assert bool(got.prompt_logprobs.chosen) == (s.prompt_logprobs is not None)
    if s.prompt_logprobs is not None:
        start = s.prompt_logprobs_start
        check_scores(got.prompt_logprobs, logits[start:end], prompt[start + 1 :], s.prompt_logprobs)
    assert bool(got.logprobs.chosen) == (s.logprobs is not None)
    if s.logprobs is not None:
        check_scores(got.logprobs, logits[end:-1], got.tokens, s.logprobs)
    assert bool(got.context_logits) == s.return_context_logits
    if s.return_context_logits:
        check_logits(got.context_logits, logits[: end + 1])
    assert bool(got.generation_logits) == s.return_generation_logits
    if s.return_generation_logits:
        check_logits(got.generation_logits, logits[end:-1])
        greedy = np.concatenate(got.generation_logits).argmax(1).tolist()
        assert s.temperature > 0.0 or greedy == got.tokens


@cache
def plain_tokens() -> list[list[int]]:
    ring = Ring(DEMO_MODEL, SETTINGS["plain"])
    outputs = ring.generate(prompts(), sampling(), solo=True)
    ring.close()
    return outputs


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_what_is_reported_equals_a_full_forward_in_any_setting(setting: Setting) -> None:
    ring = Ring(DEMO_MODEL, setting)
    try:
        first = ring.generate_each(prompts(), sampling(), solo=False)
        assert (ring.lifecycle.num_retracted > 0) == (setting.max_rows == 8)
        again = ring.generate_each(prompts(), sampling(), solo=True)
    finally:
        ring.close()
    for outputs in (first, again):
        for prompt, s, got in zip(prompts(), sampling(), outputs, strict=True):
            check(prompt, s, got)
        assert [got.tokens for got in outputs] == plain_tokens()


def test_only_requests_that_look_at_their_prompt_bypass_the_cache() -> None:
    ring = Ring(DEMO_MODEL, SETTINGS["ample"])
    prompt = list(range(100, 140))
    ask = [
        SamplingParams(max_tokens=2, seed=0),
        SamplingParams(max_tokens=2, seed=0, logprobs=3, return_generation_logits=True),
        SamplingParams(max_tokens=2, seed=0, prompt_logprobs=0),
        SamplingParams(max_tokens=2, seed=0, return_context_logits=True),
        SamplingParams(max_tokens=2, seed=0, prompt_logprobs=0, prompt_logprobs_start=20),
    ]
    try:
        ring.generate([prompt], ask[2:3], solo=True)
        outputs = ring.generate_each([prompt] * len(ask), ask, solo=True)
    finally:
        ring.close()
    closed = [got.closed for got in outputs]
    assert [end.cached_tokens for end in closed if end is not None] == [32, 32, 0, 0, 16]
