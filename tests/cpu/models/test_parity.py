"""The same tokens as transformers, whatever the scheduler does: radix, overlap, page size, chunk, pool and
batch mix.

The demo model in float32. A pairwise covering array of the settings is run always, their full product with
`-m full`, with more prompts and longer outputs. Seeded sampling has no reference elsewhere; it must be the
same in every setting.
"""

from __future__ import annotations

import inspect
import itertools
import json
import random
import textwrap
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, LlamaForCausalLM

from runtime.settings.config import DEMO_MODEL
from runtime.wire.sampling_params import SamplingParams
from tests.harness.ring.serving_ring import Ring, Setting


class Load(NamedTuple):
    num_prompts: int
    num_tokens: int
    """Tokens of each output."""


SHORT = Load(16, 24)
LONG = Load(50, 64)
FACTORS: dict[str, tuple[object, object]] = {
    "radix": (True, False),
    "overlap": (True, False),
    "page_size": (16, 1),
    "chunk": (512, 16),
    "pool": ("ample", "tiny"),
    "solo": (False, True),
}
# About two and a half sequences of the largest size: with eight rows somebody always has to give way.
TINY_POOL_TOKENS = 384
TINY_ROWS = 8

Levels = tuple[int, ...]


def covering_array() -> list[Levels]:
    """Six runs in which every pair of two-level factors takes all four combinations (ten factors would fit).

    The first run has level 0 everywhere; of the other five, each factor has level 1 in a different three. Two
    different sets of three out of five meet in one or two runs, and neither holds the other. (Kleitman and
    Spencer, 1973.)
    """
    ones = list(itertools.islice(itertools.combinations(range(1, 6), 3), len(FACTORS)))
    return [tuple(int(run in where) for where in ones) for run in range(6)]


def full_product() -> list[Levels]:
    return list(itertools.product((0, 1), repeat=len(FACTORS)))


def setting_of(levels: Levels) -> tuple[Setting, bool]:
    """(setting, solo)"""
    chosen = {name: values[level] for (name, values), level in zip(FACTORS.items(), levels, strict=True)}
    tiny = chosen["pool"] == "tiny"
    setting = Setting(
        radix=bool(chosen["radix"]),
        overlap=bool(chosen["overlap"]),
        page_size=16 if chosen["page_size"] == 16 else 1,
        chunk=512 if chosen["chunk"] == 512 else 16,
        pool_tokens=TINY_POOL_TOKENS if tiny else 65536,
        max_rows=TINY_ROWS if tiny else 64,
    )
    return setting, bool(chosen["solo"])


def name_of(levels: Levels) -> str:
    return "-".join(str(values[level]) for values, level in zip(FACTORS.values(), levels, strict=True))


@cache
def prompts(number: int) -> list[list[int]]:
    """Pieces of the standard library's sources, 4 to 80 tokens; some are alike, some begin alike."""
    rng = random.Random(0)
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    ids: list[int] = []
    for module in (textwrap, json, inspect):
        ids += tokenizer.encode(inspect.getsource(module)).ids
    made: list[list[int]] = []
    for n in range(number):
        start, length = rng.randrange(len(ids) - 100), rng.randrange(4, 80)
        piece = ids[start : start + length]
        if n % 5 == 3:
            piece = made[n - 1][:40] + piece[:20]
        if n % 10 == 9:
            piece = list(made[n - 2])
        made.append(piece)
    return made


@cache
def greedy_reference(load: Load) -> list[list[int]]:
    """Return what transformers' `generate` makes of each prompt alone."""
    model = LlamaForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    config = GenerationConfig(do_sample=False, max_new_tokens=load.num_tokens, eos_token_id=0, pad_token_id=0)
    outputs = []
    with torch.inference_mode():
        for prompt in prompts(load.num_prompts):
            out = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                generation_config=config,
            )
            outputs.append(out[0, len(prompt) :].tolist())
    return outputs


def greedy(load: Load) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=load.num_tokens, temperature=0.0, seed=0)] * load.num_prompts


def seeded(load: Load) -> list[SamplingParams]:
    common: dict[str, Any] = {"max_tokens": load.num_tokens, "temperature": 1.0}
    return [SamplingParams(seed=1000 + n, **common) for n in range(load.num_prompts)]


@cache
def seeded_reference(load: Load) -> list[list[int]]:
    """Each prompt alone, in the plainest setting."""
    ring = Ring(DEMO_MODEL, Setting(radix=False, overlap=False))
    outputs = ring.generate(prompts(load.num_prompts), seeded(load), solo=True)
    ring.close()
    return outputs


def check(levels: Levels, load: Load) -> None:
    setting, solo = setting_of(levels)
    asked = prompts(load.num_prompts)
    ring = Ring(DEMO_MODEL, setting)
    try:
        assert ring.generate(asked, greedy(load), solo=solo) == greedy_reference(load)
        assert ring.generate(asked, seeded(load), solo=solo) == seeded_reference(load)
        num_retracted = ring.lifecycle.num_retracted
    finally:
        ring.close()
    if setting.max_rows == TINY_ROWS and not solo:
        assert num_retracted > 0, "the tiny pool forced nobody to give way"


def test_covering_array_covers_all_pairs() -> None:
    array = covering_array()
    for a, b in itertools.combinations(range(len(FACTORS)), 2):
        assert {(run[a], run[b]) for run in array} == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_references_say_something() -> None:
    """Prompts differ, outputs differ, and sampling is not greedy in disguise."""
    greedy, seeded = greedy_reference(SHORT), seeded_reference(SHORT)
    assert len(greedy) == SHORT.num_prompts
    assert len({tuple(out) for out in greedy}) > SHORT.num_prompts // 2
    assert sum(a == b for a, b in zip(greedy, seeded, strict=True)) < SHORT.num_prompts // 4


@pytest.mark.parametrize("levels", covering_array(), ids=name_of)
def test_tokens_do_not_depend_on_the_setting(levels: Levels) -> None:
    check(levels, SHORT)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("levels", full_product(), ids=name_of)
def test_tokens_do_not_depend_on_the_setting_full_product(levels: Levels) -> None:
    check(levels, LONG)
