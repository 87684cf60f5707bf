"""Additional outputs are the hidden states of transformers, whatever the scheduler does.

Requests of the demo model in float32, some with all outputs, some with one, some with none, all at once.
Afterwards they come again and hit the cache.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from runtime.settings.config import DEMO_MODEL
from runtime.wire.sampling_params import SamplingParams
from tests.cpu.models.test_parity_logprobs import prompts
from tests.harness.models.native import needs_compiler
from tests.harness.models.rank_ring import RankRing
from tests.harness.ring.serving_ring import Generated, Ring, Setting

TOLERANCE = 1e-4
NUM_TOKENS = 12
SOME = "hidden_states:0,hidden_states:2,hidden_states,self_attn:1,mlp:0"
NAMES = tuple(SOME.split(","))
TINY = {"pool_tokens": 176, "max_rows": 8}

SETTINGS = {
    "serial": Setting(radix=False, overlap=False, outputs=SOME),
    "tiny-chunks": Setting(chunk=13, outputs=SOME, **TINY),  # type: ignore[arg-type]
    "ample": Setting(chunk=64, outputs=SOME),
    "speculation": Setting(outputs=SOME, speculation="NGRAM"),
}


def sampling() -> list[SamplingParams]:
    """Every fourth wants nothing; the others all or some outputs, with their prompt's or without."""
    made = []
    for n in range(len(prompts())):
        names = ((), NAMES, NAMES[1:2], NAMES[2:])[n % 4]
        made.append(
            SamplingParams(
                max_tokens=NUM_TOKENS,
                seed=n,
                temperature=float(n % 2),
                ignore_eos=True,
                additional_outputs=names,
                gather_context=bool(names) and n % 3 == 1,
                return_context_logits=n % 5 == 1,
                prompt_logprobs=1 if n % 7 == 1 else None,
            )
        )
    return made


@cache
def model() -> LlamaForCausalLM:
    hf: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    return hf


@torch.inference_mode()
def outputs_of(ids: list[int]) -> dict[str, Tensor]:
    """Each output of NAMES, a row for each id, by the library's own account and hooks."""
    got: dict[str, Tensor] = {}
    hf = model()
    layers = hf.model.layers
    hooks = [
        layers[1].self_attn.register_forward_hook(lambda *call: got.update({"self_attn:1": call[2][0][0]})),
        layers[0].mlp.register_forward_hook(lambda *call: got.update({"mlp:0": call[2][0]})),
    ]
    try:
        states = hf(torch.tensor([ids]), output_hidden_states=True).hidden_states
    finally:
        for hook in hooks:
            hook.remove()
    got |= {"hidden_states:0": states[0][0], "hidden_states:2": states[2][0], "hidden_states": states[-1][0]}
    return got


def check(prompt: list[int], s: SamplingParams, got: Generated) -> None:
    assert len(got.tokens) == NUM_TOKENS
    expected = outputs_of(prompt + got.tokens[:-1])
    wanted = {f"generation_{name}": expected[name][len(prompt) :] for name in s.additional_outputs}
    if s.gather_context:
        wanted |= {f"context_{name}": expected[name][: len(prompt)] for name in s.additional_outputs}
    assert got.outputs.keys() == wanted.keys()
    for name, rows in wanted.items():
        np.testing.assert_allclose(np.concatenate(got.outputs[name]), rows, atol=TOLERANCE, err_msg=name)


@cache
def plain_tokens() -> list[list[int]]:
    ring = Ring(DEMO_MODEL, Setting(radix=False, overlap=False))
    try:
        plain = [
            SamplingParams(max_tokens=NUM_TOKENS, seed=s.seed, temperature=s.temperature, ignore_eos=True)
            for s in sampling()
        ]
        return ring.generate(prompts(), plain, solo=False)
    finally:
        ring.close()


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_rows_equal_the_librarys_in_any_setting(setting: Setting) -> None:
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
        drafts = [got.closed.drafts for got in outputs if got.closed is not None]
        num_right = sum(each.num_accepted for each in drafts if each is not None)
        assert (num_right > 0) == (setting.speculation != "none")
        assert [got.tokens for got in outputs] == plain_tokens()


def test_only_rows_of_the_prompt_bypass_the_cache() -> None:
    ring = Ring(DEMO_MODEL, SETTINGS["ample"])
    prompt = list(range(100, 140))
    ask = [
        SamplingParams(max_tokens=2, seed=0),
        SamplingParams(max_tokens=2, seed=0, additional_outputs=NAMES),
        SamplingParams(max_tokens=2, seed=0, additional_outputs=NAMES, gather_context=True),
    ]
    try:
        ring.generate([prompt], ask[:1], solo=True)
        outputs = ring.generate_each([prompt] * len(ask), ask, solo=True)
    finally:
        ring.close()
    closed = [got.closed for got in outputs]
    assert [end.cached_tokens for end in closed if end is not None] == [32, 32, 0]
    for s, got in zip(ask, outputs, strict=True):
        assert len(got.tokens) == 2
        assert {name: sum(map(len, rows)) for name, rows in got.outputs.items()} == {
            **{f"generation_{name}": 1 for name in s.additional_outputs},
            **{f"context_{name}": 40 for name in s.additional_outputs if s.gather_context},
        }


@needs_compiler
def test_two_ranks_give_the_rows_of_one(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    ring = RankRing(DEMO_MODEL, Setting(chunk=16, outputs=SOME), 2, tmp_path / "ranks")
    some = slice(1, 6)
    try:
        outputs = ring.generate_each(prompts()[some], sampling()[some], solo=False)
    finally:
        ring.close()
    for prompt, s, got in zip(prompts()[some], sampling()[some], outputs, strict=True):
        check(prompt, s, got)


@needs_compiler
def test_a_recorded_step_is_left_for_rows_that_want_outputs_alone() -> None:
    ring = Ring(DEMO_MODEL, Setting(outputs=SOME))
    runner = ring._executor._worker._runner
    computed: list[int] = []
    compute = runner._compute

    def note(plan: object) -> object:
        computed.append(1)
        return compute(plan)  # type: ignore[arg-type]

    runner._compute = note  # type: ignore[method-assign,assignment]
    try:
        assert runner._recording is not None
        ring.generate([prompts()[0]], [SamplingParams(max_tokens=8, seed=0, ignore_eos=True)], solo=True)
        assert not computed
        asking = SamplingParams(max_tokens=8, seed=0, ignore_eos=True, additional_outputs=NAMES)
        ring.generate([prompts()[0]], [asking], solo=True)
        assert len(computed) >= 8
    finally:
        ring.close()
