"""Beam searches against transformers' `generate(num_beams=...)`: the same tokens, order, ends and scores.

The scheduler and the worker as they are, in float32, all searches of a model at once. `-m full` draws 2,000.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from runtime.checkpoint.checkpoint_config import CheckpointConfig
from runtime.settings.config import DEMO_MODEL, RuntimeConfig
from runtime.wire.handle import next_sibling
from runtime.wire.sampling_params import SamplingParams
from tests.harness.models.model_registry import CASES
from tests.harness.models.reference import make_checkpoint
from tests.harness.ring.beam_draws import Draw, Found, assert_same, draws, found_by, searched
from tests.harness.ring.serving_ring import Generated, Ring, Setting

TINY = ("llama", "qwen2", "mistral", "gemma2")
NUM_DRAWS = {"demo": 20, **dict.fromkeys(TINY, 10)}
NUM_DRAWS_FULL = 400
NUM_TOKENS = 12


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def checkpoint(name: str, path: Path) -> tuple[PreTrainedModel, Path]:
    if name == "demo":
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
        return model.eval(), DEMO_MODEL
    model = make_checkpoint(CASES[name], path)
    model.config.eos_token_id = 3
    model.save_pretrained(path)
    return model, path


def run(path: Path, asked: list[Draw], setting: Setting) -> list[list[Found]]:
    ring = Ring(path, setting)
    try:
        handles = [ring.submit(draw.prompt, draw.sampling) for draw in asked]
        generated: dict[bytes, Generated] = ring.run()
    finally:
        ring.close()
    return [found_by(generated, handle, draw.n) for handle, draw in zip(handles, asked, strict=True)]


def check(name: str, path: Path, num_draws: int, num_tokens: int, seed: int) -> None:
    model, path = checkpoint(name, path)
    eos_ids = CheckpointConfig.read(path).eos_token_ids
    asked = draws(seed, num_draws, model.config.get_text_config().vocab_size, num_tokens)
    found = run(path, asked, Setting(beams=8))
    for draw, got in zip(asked, found, strict=True):
        assert_same(got, searched(model, draw, eos_ids), draw)


@pytest.mark.parametrize("name", NUM_DRAWS)
def test_hypotheses_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    check(name, tmp_path, NUM_DRAWS[name], NUM_TOKENS, seed=1)


@pytest.mark.full
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", NUM_DRAWS)
def test_hypotheses_are_those_of_transformers_in_2000_draws(name: str, tmp_path: Path) -> None:
    check(name, tmp_path, NUM_DRAWS_FULL, 40, seed=2)


@pytest.mark.parametrize("name", ["demo", "llama"])
def test_forbidden_ids_are_those_of_transformers_processors(name: str, tmp_path: Path) -> None:
    """Min tokens, and bad words of one to three ids, made of what is found without them."""
    model, path = checkpoint(name, tmp_path)
    eos_ids = CheckpointConfig.read(path).eos_token_ids
    free = draws(5, 8, model.config.get_text_config().vocab_size, NUM_TOKENS)
    some = []
    for number, (draw, found) in enumerate(zip(free, run(path, free, Setting(beams=8)), strict=True)):
        tokens = [*draw.prompt, *found[0].tokens]
        at = len(draw.prompt) + number % len(found[0].tokens)
        words = [tuple(tokens[max(0, at - more) : at + 1]) for more in (0, 1, 2)]
        words = [word for word in words if word[-1] not in eos_ids]
        min_tokens = min(3, draw.num_tokens) if number % 2 else 0
        some.append(draw._replace(bad_words=tuple(words[number % 3 :]), min_tokens=min_tokens))
    for draw, got in zip(some, run(path, some, Setting(beams=8)), strict=True):
        assert_same(got, searched(model, draw, eos_ids), draw)


def with_rules(draw: Draw, vocab_size: int, rng: random.Random) -> Draw:
    """With some of the rules that transformers has processors for, now and then all of them."""
    ids = sorted(set(draw.prompt))
    changes: dict[str, Any] = {
        "repetition": rng.choice([0.5, 0.8, 1.2, 3.0]),
        "ngram": rng.choice([1, 2, 3]),
        "bias": tuple(
            (token, rng.choice([-20.0, -0.5, 0.5, 4.0]))
            for token in {*rng.sample(range(1, vocab_size), 3), rng.choice(ids)}
        ),
        "allowed": tuple(
            {*rng.sample(range(1, vocab_size), min(200, vocab_size // 2)), *ids[:3], *draw.more_stop_ids}
        ),
    }
    names = rng.choice([[name] for name in changes] + [["repetition", "bias"], list(changes)])
    if len(names) > 2:
        changes["ngram"] = 2  # allowed ids none of which comes twice are used up before the end
    return draw._replace(**{name: changes[name] for name in names})


def check_rules(name: str, path: Path, num_draws: int, num_tokens: int, seed: int) -> None:
    model, path = checkpoint(name, path)
    eos_ids = CheckpointConfig.read(path).eos_token_ids
    vocab_size, rng = model.config.get_text_config().vocab_size, random.Random(seed)
    some = [with_rules(draw, vocab_size, rng) for draw in draws(seed, num_draws, vocab_size, num_tokens)]
    for draw, got in zip(some, run(path, some, Setting(beams=8)), strict=True):
        assert_same(got, searched(model, draw, eos_ids), draw)


@pytest.mark.parametrize("name", ["demo", "llama"])
def test_penalties_ngrams_bias_and_allowed_ids_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    check_rules(name, tmp_path, 16, NUM_TOKENS, seed=7)


@pytest.mark.full
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", NUM_DRAWS)
def test_rules_are_those_of_transformers_in_many_draws(name: str, tmp_path: Path) -> None:
    check_rules(name, tmp_path, NUM_DRAWS_FULL // 2, 40, seed=8)


class PresetRing(Ring):
    """With TensorRT-LLM's defaults."""

    def settings(self, config: RuntimeConfig) -> RuntimeConfig:
        return msgspec.structs.replace(config, beam_defaults="trtllm")


def test_a_preset_says_what_a_search_takes_that_does_not_say_it() -> None:
    draw = Draw([5, 6, 7, 8], 4, 0.0, 1, NUM_TOKENS, (), 4)
    silent = msgspec.structs.replace(draw.sampling, length_penalty=None, early_stopping=None)
    ring = PresetRing(DEMO_MODEL, Setting(beams=8))
    try:
        handles = [ring.submit(draw.prompt, each) for each in (draw.sampling, silent)]
        generated = ring.run()
    finally:
        ring.close()
    said, by_default = (found_by(generated, handle, draw.n) for handle in handles)
    assert by_default == said
    plain = run(DEMO_MODEL, [draw._replace(penalty=1.0, stopping=0)], Setting(beams=8))[0]
    assert [each.score for each in plain] != [each.score for each in said]


SETTINGS = {
    "no overlap, pages of 1": Setting(beams=8, overlap=False, page_size=1),
    "chunks, no radix": Setting(beams=8, chunk=16, radix=False),
    "a small pool": Setting(beams=8, chunk=16, page_size=4, pool_tokens=512, max_rows=16),
    "no evict": Setting(beams=8, capacity="guaranteed_no_evict", pool_tokens=2048),
    "inflight": Setting(beams=8, batching="inflight"),
    "taken back": Setting(beams=8),
    "asked again": Setting(beams=8),
}


@cache
def plain() -> list[list[Found]]:
    return run(DEMO_MODEL, asked(), Setting(beams=8))


def asked() -> list[Draw]:
    vocab_size, rng = CheckpointConfig.read(DEMO_MODEL).vocab_size, random.Random(3)
    some = draws(3, 8, vocab_size, NUM_TOKENS)
    return [with_rules(draw, vocab_size, rng) if at % 3 == 0 else draw for at, draw in enumerate(some)]


@pytest.mark.parametrize("name", SETTINGS)
def test_hypotheses_do_not_depend_on_the_setting(name: str) -> None:
    ring = Ring(DEMO_MODEL, SETTINGS[name])
    lifecycle, kv = ring.lifecycle, ring.lifecycle.kv
    try:
        if name == "asked again":  # what the prefix cache has is not computed
            for draw in asked():
                ring.submit(draw.prompt, draw.sampling)
            ring.run()
            assert kv.cache.num_pages
        handles = [ring.submit(draw.prompt, draw.sampling) for draw in asked()]
        plain_one = ring.submit([5, 6, 7], SamplingParams(max_tokens=9, temperature=0.0, seed=0))
        if name == "taken back":
            for _ in range(5):
                ring.scheduler.step([])
            for req in kv.rows.running_requests():
                lifecycle.retract(req)
        generated = ring.run()
        assert lifecycle.num_retracted if name == "taken back" else True
        assert len(generated[plain_one].tokens) == 9
        assert not kv.pages.num_more_owners.any()
        assert kv.pages.num_free + kv.cache.num_pages == kv.pages.num_pages
    finally:
        ring.close()
    for draw, handle, wanted in zip(asked(), handles, plain(), strict=True):
        assert_same(found_by(generated, handle, draw.n), wanted, draw)


def test_logprobs_are_the_models_own_whatever_rules_make_of_them() -> None:
    """Those of each token and of the likeliest in its place; the sum of them is with the hypothesis."""
    model, _ = checkpoint("demo", DEMO_MODEL)
    free = Draw([5, 6, 7, 8], 4, 1.0, 0, NUM_TOKENS, (), 3)
    some = [free, free._replace(repetition=1.5, ngram=2, bias=((40, 3.0),))]
    ring = Ring(DEMO_MODEL, Setting(beams=8))
    try:
        handles = [
            ring.submit(draw.prompt, msgspec.structs.replace(draw.sampling, logprobs=2)) for draw in some
        ]
        generated = ring.run()
    finally:
        ring.close()
    for handle, draw in zip(handles, some, strict=True):
        for number in range(draw.n):
            got = generated[next_sibling(handle, number)]
            with torch.inference_mode():
                logits = model(torch.tensor([[*draw.prompt, *got.tokens]])).logits[0]
            wanted = logits.log_softmax(-1)[len(draw.prompt) - 1 : -1]
            chosen = wanted.gather(1, torch.tensor(got.tokens)[:, None])[:, 0].numpy()
            top = wanted.topk(2).values.numpy()
            assert np.allclose(np.concatenate(got.logprobs.chosen), chosen, atol=1e-4)
            assert np.allclose(np.concatenate(got.logprobs.top), top, atol=1e-4)
            assert got.closed is not None
            assert got.closed.beam is not None
            assert got.closed.beam.logprob == pytest.approx(chosen.sum().item(), abs=1e-4)


def test_a_search_waits_for_the_rows_of_another_one() -> None:
    draw = Draw([5, 6, 7], 8, 1.0, 0, NUM_TOKENS, (), 2)
    ring = Ring(DEMO_MODEL, Setting(beams=8, max_rows=8))
    most = 0
    try:
        handles = [ring.submit(draw.prompt, draw.sampling) for _ in range(2)]
        while not ring.scheduler.is_idle and ring.lifecycle.requests:
            ring.scheduler.step([])
            most = max(most, len(ring.lifecycle.kv.rows.running_requests()))
        generated = ring.run()
    finally:
        ring.close()
    assert most == 1
    assert found_by(generated, handles[0], 2) == found_by(generated, handles[1], 2)


def test_a_long_prompt_is_held_once_and_a_fork_takes_no_page() -> None:
    prompt = [1 + n % 400 for n in range(1000)]
    draw = Draw(prompt, 8, 1.0, 0, 40, (), 8)
    ring = Ring(DEMO_MODEL, Setting(beams=8))
    kv = ring.lifecycle.kv
    try:
        ring.submit(prompt, draw.sampling)
        while not kv.pages.num_more_owners.any():
            ring.scheduler.step([])
            num_held = kv.pages.num_pages - kv.pages.num_free
            num_output = max(req.num_output for req in kv.rows.holders())
            most = 1000 // 16 + 8 * (-(-(8 + num_output) // 16))
            assert num_held <= most, "the prompt is there more than once"
        generated = ring.run()
    finally:
        ring.close()
    assert len(generated) == 8
    # Of the output the tree has what the best row had: less than two pages beside the prompt.
    assert kv.cache.num_pages <= (1000 + 40) // 16


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"beam_width": 9}, "beam_width is 9; the server was started with --max-beam-width 8"),
        ({"top_p": 0.5}, "top_p: not together with use_beam_search"),
        ({"min_p": 0.5}, "min_p: not together"),
        ({"speculative_num_draft_tokens": 2}, "speculative_num_draft_tokens: not together"),
        ({"max_tokens": 2000}, "ask for fewer max_tokens or beams"),
    ],
)
def test_what_cannot_be_searched_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    ring = Ring(DEMO_MODEL, Setting(beams=8, pool_tokens=4096))
    draw = Draw([1, 2, 3], 8, 1.0, 0, 4, (), 2)
    try:
        ring.submit(draw.prompt, msgspec.structs.replace(draw.sampling, **changes))
        with pytest.raises(AssertionError, match=named):
            ring.run()
    finally:
        ring.close()


@pytest.mark.parametrize("changes", [{"top_k": 0}, {"speculative_num_draft_tokens": 0}, {"min_p": 0.0}])
def test_what_asks_for_nothing_goes_with_a_search(changes: dict[str, Any]) -> None:
    ring = Ring(DEMO_MODEL, Setting(beams=8))
    draw = Draw([1, 2, 3], 2, 1.0, 0, 4, (), 2)
    try:
        ring.submit(draw.prompt, msgspec.structs.replace(draw.sampling, **changes))
        assert len(ring.run()) == 2
    finally:
        ring.close()


def test_a_width_above_the_rows_is_refused_with_both_numbers() -> None:
    ring = Ring(DEMO_MODEL, Setting(beams=8, max_rows=4))
    draw = Draw([1, 2, 3], 8, 1.0, 0, 4, (), 2)
    try:
        ring.submit(draw.prompt, draw.sampling)
        with pytest.raises(AssertionError, match="beam_width is 8, more than the 4 rows"):
            ring.run()
    finally:
        ring.close()
