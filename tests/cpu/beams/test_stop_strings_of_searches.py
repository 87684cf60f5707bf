"""Stop strings of beam searches: a hypothesis in whose text one is complete has ended, as in transformers."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoTokenizer

from runtime.checkpoint.checkpoint_config import CheckpointConfig
from runtime.settings.config import DEMO_MODEL
from runtime.text.selection import open_tokenizer
from tests.cpu.beams.test_beams_against_transformers import checkpoint, run
from tests.harness.ring.beam_draws import Draw, assert_same, draws, searched
from tests.harness.ring.serving_ring import Setting

BREAK = "\x1d"
"""Last text of every prompt, in no stop string: transformers looks for stop strings in the prompt, too."""


def with_stops(seed: int, count: int, num_tokens: int) -> list[Draw]:
    """Searches for stop strings of the texts that are found without them."""
    tokenizer, rng = open_tokenizer(str(DEMO_MODEL)), random.Random(seed)
    ends = tokenizer.encode_batch([BREAK], add_special_tokens=False)[0].tolist()
    free = [
        draw._replace(prompt=draw.prompt + ends)
        for draw in draws(seed, count, CheckpointConfig.read(DEMO_MODEL).vocab_size, num_tokens)
    ]
    made = []
    for draw, found in zip(free, run(DEMO_MODEL, free, Setting(beams=8)), strict=True):
        texts = [tokenizer.decode(each.tokens).replace("\ufffd", "") for each in found]
        stops = set()
        for text in filter(None, texts[:2]):
            at = rng.randrange(len(text))
            stops.add(text[at : at + rng.choice([1, 1, 2, 3, 6])])
        made.append(draw._replace(stop=tuple(sorted(stops))))
    return made


def check(seed: int, count: int, num_tokens: int) -> int:
    """Returns how many hypotheses a stop string has ended."""
    torch.set_num_threads(1)
    model, _ = checkpoint("demo", DEMO_MODEL)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    eos_ids = CheckpointConfig.read(DEMO_MODEL).eos_token_ids
    asked = with_stops(seed, count, num_tokens)
    num_stopped = 0
    for draw, got in zip(asked, run(DEMO_MODEL, asked, Setting(beams=8)), strict=True):
        assert_same(got, searched(model, draw, eos_ids, tokenizer), draw)
        stop_ids = {*eos_ids, *draw.more_stop_ids}
        num_stopped += sum(
            len(each.tokens) < draw.num_tokens and stop_ids.isdisjoint(each.tokens) for each in got
        )
    return num_stopped


def test_hypotheses_with_stop_strings_are_those_of_transformers() -> None:
    assert check(seed=11, count=24, num_tokens=12) > 8


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_hypotheses_with_stop_strings_are_those_of_transformers_in_many_draws() -> None:
    assert check(seed=12, count=200, num_tokens=30) > 100
