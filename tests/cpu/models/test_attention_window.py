"""--max-attention-window: the tokens of a model whose config has that window, and the pages of a window.

In float32 against transformers, with every way in which a sequence may lose or share its pages.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

from runtime.wire.sampling_params import SamplingParams
from tests.harness.models.model_registry import CASES, TINY, VOCAB_SIZE
from tests.harness.models.native import needs_compiler
from tests.harness.models.rank_ring import RankRing
from tests.harness.models.reference import generated
from tests.harness.ring.serving_ring import Ring, Setting

WINDOW = 21
NUM_TOKENS = 60


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def full_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without a window."""
    path = tmp_path_factory.mktemp("mistral")
    _mistral(None).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def windowed_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights; the window is the checkpoint's own."""
    path = tmp_path_factory.mktemp("mistral_window")
    _mistral(WINDOW).save_pretrained(path)
    return path


def _mistral(window: int | None) -> MistralForCausalLM:
    torch.manual_seed(5)
    hf: MistralForCausalLM = MistralForCausalLM(MistralConfig(**TINY, sliding_window=window)).float().eval()
    return hf


@cache
def prompts() -> list[list[int]]:
    """Shorter and longer than the window; some begin alike, two are the same."""
    rng = random.Random(1)
    stem = [rng.randrange(3, VOCAB_SIZE) for _ in range(40)]
    made = [
        [rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (1, 5, 20, 21, 22, 37, 70, 90)
    ]
    return [*made, stem, stem[:30] + made[5], stem, stem + made[2]]


@cache
def reference(window: int | None) -> list[list[int]]:
    """Return what transformers generates from each prompt alone."""
    model = _mistral(window)
    with torch.inference_mode():
        return [generated(model, ids, NUM_TOKENS) for ids in prompts()]


def greedy() -> list[SamplingParams]:
    return [SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, seed=0, ignore_eos=True)] * len(prompts())


def tokens_of(ring: Ring, *, solo: bool = False) -> list[list[int]]:
    try:
        return ring.generate(prompts(), greedy(), solo=solo)
    finally:
        ring.close()


def setting(**changes: Any) -> Setting:
    return Setting(**{"page_size": 4, "max_rows": 6, "chunk": 16, "window": WINDOW} | changes)


def test_the_window_changes_what_a_longer_text_gives() -> None:
    assert all(a != b for a, b in zip(reference(None)[6:], reference(WINDOW)[6:], strict=True))


SETTINGS = {
    "chunked": setting(),
    "serial": setting(overlap=False, page_size=1, chunk=512),
    "no cache": setting(radix=False, page_size=16),
    "retracted": setting(pool_tokens=180),
    "few pages, no cache": setting(pool_tokens=152, radix=False, overlap=False, chunk=64),
    "never retracted": setting(pool_tokens=180, capacity="guaranteed_no_evict"),
    "transformers": setting(model_impl="transformers"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_tokens_are_those_of_a_model_with_that_window(name: str, full_model: Path) -> None:
    ring = Ring(full_model, SETTINGS[name])
    outputs = tokens_of(ring)
    assert outputs == reference(WINDOW)
    if name == "retracted":
        assert ring.lifecycle.num_retracted > 0, "the tiny pool forced nobody to give way"
    if name == "never retracted":
        assert ring.lifecycle.num_retracted == 0


@needs_compiler
def test_the_same_on_two_ranks(full_model: Path, tmp_path: Path) -> None:
    ring = RankRing(full_model, setting(pool_tokens=200), 2, tmp_path / "ranks")
    assert tokens_of(ring) == reference(WINDOW)


@pytest.mark.parametrize("limit", [0, 200])
def test_a_window_of_the_checkpoints_own_is_kept_where_it_is_smaller(
    windowed_model: Path, limit: int
) -> None:
    ring = Ring(windowed_model, setting(window=limit))
    assert ring.scheduler.kv.window is not None, "its pages are given back without the setting"
    assert tokens_of(ring) == reference(WINDOW)


def test_layers_without_a_window_keep_their_rotation_when_they_get_one(
    tmp_path: Path,
) -> None:
    """Gemma 3 turns what its windows see by another base: a layer that is only limited is none of them."""
    config = CASES["gemma3"].config
    torch.manual_seed(6)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(tmp_path)
    outputs = [
        tokens_of(Ring(tmp_path, Setting(page_size=4, max_rows=6, chunk=16, window=window)))
        for window in (0, 200)
    ]
    assert outputs[0] == outputs[1], "no text is longer than 200 tokens"


@pytest.mark.parametrize("radix", [True, False])
def test_pages_in_use_stop_growing_in_a_long_generation(full_model: Path, radix: bool) -> None:
    """A window of 64 and pages of 4: 17 pages, of a text of 240 tokens."""
    ring = Ring(full_model, Setting(page_size=4, max_rows=2, window=64, radix=radix))
    kv = ring.scheduler.kv
    try:
        ring.submit(prompts()[6][:40], SamplingParams(max_tokens=200, seed=0, ignore_eos=True))
        used = []
        while not ring.scheduler.is_idle:
            ring.scheduler.step([])
            kv.check()
            if kv.rows.num_running:
                used.append(kv.pages.num_pages - kv.num_available)
        assert max(used) <= (40 // 4 if radix else 0) + 17
        assert set(used[-100:]) <= {16, 17}
        assert kv.num_available == kv.pages.num_pages
    finally:
        ring.close()


def test_a_row_that_gave_back_its_beginning_is_not_found_whole(full_model: Path) -> None:
    """Pages published before are found; what came after has no beginning and is not kept."""
    ring = Ring(full_model, Setting(page_size=4, max_rows=2, window=WINDOW))
    try:
        ids = prompts()[5]
        (first,) = ring.generate([ids], greedy()[:1], solo=True)
        again = ring.generate_each([[*ids, *first, 7]], greedy()[:1], solo=True)[0]
        assert again.closed is not None
        assert again.closed.cached_tokens == len(ids) // 4 * 4
    finally:
        ring.close()
