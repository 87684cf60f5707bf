"""Layers in pipeline stages: the tokens and logits of the whole model, a stage's memory, and its settings."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from model_worker.device.cpu import CpuDevice
from model_worker.runner.stage_runner import StageRunner
from runtime.base.errors import ConfigError
from runtime.checkpoint.model_config import ModelConfig
from runtime.settings.config import DEMO_MODEL
from runtime.settings.layer_split import split_layers
from runtime.wire.sampling_params import SamplingParams
from tests.cpu.models.test_parity import prompts
from tests.cpu.parallel.test_tensor_parallel_parity import NUM_PROMPTS, TINY, sampling
from tests.harness.models.model_registry import CASES
from tests.harness.models.native import needs_compiler
from tests.harness.models.rank_ring import StageRing
from tests.harness.models.reference import vary_norms_and_biases
from tests.harness.ring.serving_ring import Generated, Ring, Setting

pytestmark = needs_compiler

SERIAL = Setting(chunk=16, overlap=False, radix=False, page_size=1, **TINY)
ASKED = SamplingParams(
    max_tokens=6,
    temperature=0.0,
    seed=1,
    ignore_eos=True,
    logprobs=3,
    prompt_logprobs=2,
    return_context_logits=True,
    return_generation_logits=True,
)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@cache
def expected() -> list[list[int]]:
    ring = Ring(DEMO_MODEL, Setting())
    try:
        return ring.generate(prompts(NUM_PROMPTS), sampling(), solo=False)
    finally:
        ring.close()


@pytest.mark.parametrize(
    ("num_stages", "tp_size", "setting"),
    [
        pytest.param(4, 1, SERIAL, marks=pytest.mark.full),
        pytest.param(2, 2, Setting(chunk=16, **TINY), marks=pytest.mark.full),
        pytest.param(2, 1, Setting(chunk=16, **TINY), marks=pytest.mark.full),
        pytest.param(3, 1, Setting(chunk=16, **TINY), marks=pytest.mark.full),
        pytest.param(4, 1, Setting(), marks=pytest.mark.full),
        pytest.param(2, 1, SERIAL, marks=pytest.mark.full),
        pytest.param(2, 2, SERIAL, marks=pytest.mark.full),
    ],
)
def test_stages_make_the_tokens_of_one(
    num_stages: int, tp_size: int, setting: Setting, tmp_path: Path
) -> None:
    ring = StageRing(DEMO_MODEL, setting, num_stages, tmp_path / "stages", tp_size=tp_size)
    try:
        assert ring.generate(prompts(NUM_PROMPTS), sampling(), solo=False) == expected()
        if setting.max_rows == TINY["max_rows"]:
            assert ring.lifecycle.num_retracted > 0, "the tiny pool forced nobody to give way"
    finally:
        ring.close()


def all_of(ring: Ring) -> list[Generated]:
    try:
        return ring.generate_each(prompts(3), [ASKED] * 3, solo=False)
    finally:
        ring.close()


# A norm behind the update, one before the next layer's addition, tied embeddings, experts, both in parallel.
FAMILIES = ["gemma2", "olmo2", "llama_tied_biased", "mixtral", "cohere_qk_norm"]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_bits_of_one_stage_in_every_layout_of_a_layer(family: str, tmp_path: Path) -> None:
    """Chunks of one of them have fewer and fewer tokens."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(11)
    config = CASES[family].config
    config.num_hidden_layers = max(2, config.num_hidden_layers)
    hf = AutoModelForCausalLM.from_config(config).float()
    vary_norms_and_biases(hf)
    hf.save_pretrained(tmp_path / "model")
    vocab_size = config.vocab_size
    asked = [[token % (vocab_size - 4) + 2 for token in range(start, start + 21)] for start in (3, 40)]

    def logits(ring: Ring) -> list[Any]:
        try:
            done = ring.generate_each(asked, [ASKED] * 2, solo=False)
        finally:
            ring.close()
        return [np.concatenate(each.context_logits + each.generation_logits) for each in done]

    setting = Setting(chunk=16, page_size=1, attention_span=10 if family == "olmo2" else 0)
    one = logits(Ring(tmp_path / "model", setting))
    two = logits(StageRing(tmp_path / "model", setting, 2, tmp_path / "stages"))
    for whole, cut in zip(one, two, strict=True):
        assert len(whole) > 20
        assert np.array_equal(whole.view(np.uint32), cut.view(np.uint32))


def test_weights_made_smaller_at_load_are_those_of_one_stage(tmp_path: Path) -> None:
    """The demo model's embedding is its head, too: the first stage reads what the last one computes with."""
    assert ModelConfig.from_path(DEMO_MODEL).tie_word_embeddings
    made = []
    for num_stages in (1, 3):
        folder = tmp_path / str(num_stages)
        made.append(all_of(StageRing(DEMO_MODEL, Setting(), num_stages, folder, quantization="int8")))
    for whole, cut in zip(*made, strict=True):
        assert whole.tokens == cut.tokens
        for one, other in zip(whole.context_logits, cut.context_logits, strict=True):
            assert np.array_equal(one.view(np.uint32), other.view(np.uint32))


def test_a_stage_has_its_layers_and_no_more(tmp_path: Path) -> None:
    config = ModelConfig.from_path(DEMO_MODEL)
    counts = [1, config.num_layers - 2, 1]
    ring = StageRing(
        DEMO_MODEL,
        Setting(),
        3,
        tmp_path / "stages",
        pp_layers=",".join(map(str, counts)),
        max_total_tokens=512,
    )
    try:
        runners = [ring.workers[rank]._runner for rank in range(3)]
        layer_sizes, page_sizes = [], []
        for runner, count in zip(runners, counts, strict=True):
            assert isinstance(runner, StageRunner)
            model = runner._stage_model
            assert len(model.model.layers) == count
            layer_sizes.append(sum(weight.numel() for weight in model.model.layers.parameters()) / count)
            page_sizes.append(runner.kv_pool.bytes_per_page() / count)
            ends = sum(weight.numel() for weight in model.parameters()) - layer_sizes[-1] * count
            table = config.vocab_size * config.hidden_size
            has_table = count == 1
            assert ends == pytest.approx(table * has_table, rel=0.02, abs=config.hidden_size)
        assert len(set(layer_sizes)) == len(set(page_sizes)) == 1
        assert len({runner.kv_pool.num_pages for runner in runners}) == 1
    finally:
        ring.close()


@pytest.mark.parametrize(("num_stages", "tp_size"), [(3, 1), (2, 2)])
def test_stages_of_one_machine_use_the_memory_that_they_may(
    num_stages: int, tp_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together, and hardly less: what is left of a page of all layers."""
    monkeypatch.setattr(CpuDevice, "free_bytes", lambda *_, **__: 64 << 20)
    settings = {"max_total_tokens": 0, "mem_fraction_static": 0.5}
    ring = StageRing(DEMO_MODEL, Setting(), num_stages, tmp_path / "stages", tp_size=tp_size, **settings)
    try:
        pools = [worker._runner.kv_pool for worker in ring.workers.values()]
        page = sum(pool.bytes_per_page() for pool in pools)
        total = sum((pool.num_pages + 1) * pool.bytes_per_page() for pool in pools)
        assert (32 << 20) - 2 * page <= total <= 32 << 20
    finally:
        ring.close()


def demo(**changes: Any) -> ModelConfig:
    return msgspec.structs.replace(ModelConfig.from_path(DEMO_MODEL), **changes)


@pytest.mark.parametrize(
    ("num_stages", "sizes", "vocab_size", "counts"),
    [
        (1, "", 16, [12]),
        (2, "", 16, [6, 6]),
        (5, "", 16, [2, 2, 3, 3, 2]),
        (4, "", 1 << 16, [1, 5, 5, 1]),
        (3, "5, 4,3", 16, [5, 4, 3]),
    ],
)
def test_layers_are_divided_by_their_weights(
    num_stages: int, sizes: str, vocab_size: int, counts: list[int]
) -> None:
    model = demo(num_layers=12, expert_layers=(False,) * 12, vocab_size=vocab_size)
    ranges = split_layers(model.layer_weights(), num_stages, sizes)
    assert [len(each) for each in ranges] == counts
    assert [layer for each in ranges for layer in each] == list(range(12))


@pytest.mark.parametrize(
    ("num_stages", "sizes", "says"),
    [
        (99, "", "99 stages cannot share"),
        (2, "3,x", "no numbers of layers"),
        (2, "0,6", "no numbers of layers"),
        (2, "2,2,2", "3 numbers for 2 stages"),
        (2, "2,2", "2,2 are 4 layers; the model has"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_the_numbers(num_stages: int, sizes: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        split_layers(demo().layer_weights(), num_stages, sizes)
