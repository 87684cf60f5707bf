"""Prohibitions of a request, and how its top_p decays, through scheduler and worker: the same in any setting.

A token's history is known to the device alone while a step is in flight, and comes from the scheduler again
after a retraction; both must give what a plain run gives.
"""

from __future__ import annotations

import random
from functools import cache

import pytest
from msgspec import structs

from runtime.settings.config import DEMO_MODEL
from runtime.wire.sampling_params import SamplingParams
from tests.harness.ring.serving_ring import Ring, Setting

NUM_PROMPTS = 18
NUM_TOKENS = 28
VOCAB = 4096
PLAIN = Setting(radix=False, overlap=False)
TINY = Setting(chunk=17, pool_tokens=160, max_rows=8)
TINY_SERIAL = Setting(page_size=1, chunk=9, pool_tokens=120, max_rows=8, overlap=False)
AMPLE = Setting()


@cache
def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(2, 50))] for _ in range(NUM_PROMPTS)]


def plain_params(n: int) -> SamplingParams:
    return SamplingParams(max_tokens=NUM_TOKENS, seed=n, temperature=[0.0, 0.8][n % 2], ignore_eos=True)


@cache
def unbridled() -> list[list[int]]:
    """Return what the prompts give without any of it: where the phrases to be forbidden come from."""
    ring = Ring(DEMO_MODEL, PLAIN)
    outputs = ring.generate(prompts(), [plain_params(n) for n in range(NUM_PROMPTS)], solo=False)
    ring.close()
    return outputs


@cache
def sampling() -> list[SamplingParams]:
    rng = random.Random(4)
    made = []
    for n, output in enumerate(unbridled()):
        s = plain_params(n)
        if n % 3 != 1:
            phrase = tuple(output[4:7])
            s = structs.replace(s, bad_words_ids=((output[0],), phrase, tuple(output[9:11])))
        if n % 4 < 2:
            s = structs.replace(s, no_repeat_ngram_size=1 + n % 3)
        if n % 5 == 0:
            allowed = {*output, *rng.sample(range(VOCAB), 200)}
            s = structs.replace(s, allowed_token_ids=tuple(sorted(allowed)))
        if n % 2:
            resets = tuple(dict.fromkeys(output[2:6]))
            s = structs.replace(s, top_p=0.98, top_p_decay=0.7, top_p_min=0.2, top_p_reset_ids=resets)
        if n % 6 == 5:
            s = structs.replace(s, min_tokens=9, repetition_penalty=1.1, stop_token_ids=(output[1],))
        s.validate()
        made.append(s)
    return made


def generate(setting: Setting, *, solo: bool) -> tuple[list[list[int]], int]:
    """(output ids of each prompt, retractions)"""
    ring = Ring(DEMO_MODEL, setting)
    try:
        return ring.generate(prompts(), sampling(), solo=solo), ring.lifecycle.num_retracted
    finally:
        ring.close()


@cache
def expected() -> list[list[int]]:
    return generate(PLAIN, solo=True)[0]


def grams(ids: list[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)]


def test_no_bad_word_no_repeated_ngram_and_no_other_than_an_allowed_id_comes_out() -> None:
    for prompt, s, output, before in zip(prompts(), sampling(), expected(), unbridled(), strict=True):
        context = prompt + output
        for word in s.bad_words_ids:
            first = max(0, len(prompt) - len(word) + 1)
            assert word not in grams(context[first:], len(word))
            assert word in grams(before, len(word)), "it came when nothing forbade it"
        if s.no_repeat_ngram_size:
            seen = grams(context, s.no_repeat_ngram_size)
            assert all(gram not in seen[:i] for i, gram in enumerate(seen) if i >= len(prompt))
        assert not s.allowed_token_ids or set(output) <= set(s.allowed_token_ids)
    assert sum(a != b for a, b in zip(expected(), unbridled(), strict=True)) > NUM_PROMPTS // 2


@pytest.mark.parametrize("setting", [AMPLE, TINY, TINY_SERIAL], ids=["ample", "tiny", "tiny-serial"])
def test_tokens_under_prohibitions_do_not_depend_on_the_setting(setting: Setting) -> None:
    outputs, num_retracted = generate(setting, solo=False)
    assert outputs == expected()
    assert (num_retracted > 0) == (setting is not AMPLE)
