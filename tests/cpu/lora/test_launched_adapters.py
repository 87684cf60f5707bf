"""Adapters in a whole launch, over HTTP and with the client library, against weights that hold them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from carousel import Client, InvalidRequest, LoRARequest, SamplingParams
from tests.harness.adapters import write_adapter
from tests.harness.models.adapted import ADAPTERS, merged, save_adapter
from tests.harness.ring.beam_draws import assert_same, found_of, plain_draw, searched
from tests.harness.ring.launched import ROOT, Launched, launched

PROMPT = list(range(100, 148))
NUM_TOKENS = 24
NAMES = ("sql", "chat", "third", "fourth")
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


class Served(NamedTuple):
    launch: Launched
    client: Client
    folder: Path
    base: PreTrainedModel

    def path(self, name: str) -> Path:
        return self.folder / name

    def reference(self, name: str) -> PreTrainedModel:
        """Return the model that an adapter has been merged into; name: empty for the base."""
        return merged(self.base, self.path(name)) if name else self.base

    def wanted(self, name: str, prompt: list[int] = PROMPT) -> list[int]:
        """Return the greedy tokens of the reference."""
        with torch.no_grad():
            ids = self.reference(name).generate(
                torch.tensor([prompt]),
                do_sample=False,
                max_new_tokens=NUM_TOKENS,
                min_new_tokens=NUM_TOKENS,
                repetition_penalty=1.0,
            )
        return list(ids[0, len(prompt) :].tolist())

    def check(self, name: str, prompt: list[int], ids: Sequence[int], num_tokens: int = NUM_TOKENS) -> None:
        """Hold greedy tokens against the reference: each is what it makes likeliest behind those before it,
        which takes one forward instead of one for each token.
        """
        assert len(ids) == num_tokens
        with torch.no_grad():
            logits = self.reference(name)(torch.tensor([[*prompt, *ids]])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == list(ids)

    def generate(self, name: str, prompt: list[int] = PROMPT, **options: Any) -> Any:
        asked = LoRARequest(name, 1) if name else None
        return self.client.generate(prompt, GREEDY, lora_request=asked, **options)

    def info(self) -> dict[str, Any]:
        info: dict[str, Any] = httpx.get(f"{self.launch.url}/server_info", timeout=30).json()
        return info


def save(base: PreTrainedModel, path: Path, seed: int) -> None:
    """Write an adapter that changes what the model says."""
    save_adapter(base, ADAPTERS["rank_8"], path, seed)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("adapters")
    base = AutoModelForCausalLM.from_pretrained(ROOT / "carousel" / "demo_model", dtype=torch.float32)
    for seed, name in enumerate((*NAMES, "own")):
        save(base, folder / name, seed)
    modules = ",".join(f"{name}={folder / name}" for name in NAMES)
    arguments = (
        *("--dtype", "float32", "--lora-modules", modules, "--max-loras", "2", "--max-beam-width", "4"),
        # Few enough that somebody has to give way, and chunks.
        *("--max-total-tokens", "1536", "--schedule-conservativeness", "0.1", "--chunked-prefill-size", "64"),
    )
    with launched(*arguments) as launch, Client(launch.run_dir) as client:
        yield Served(launch, client, folder, base)


def test_each_way_to_ask_gives_what_merged_weights_give(served: Served) -> None:
    wanted = {name: served.wanted(name) for name in ("", "sql", "chat")}
    assert len({tuple(ids) for ids in wanted.values()}) == 3
    body = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True}
    for name, ids in wanted.items():
        assert served.generate(name).outputs[0].token_ids == ids
        reply = httpx.post(
            f"{served.launch.url}/v1/completions",
            json={"prompt": PROMPT, **body} | ({"model": name} if name else {}),
            timeout=60,
        ).json()
        assert reply["choices"][0]["token_ids"] == ids
        reply = httpx.post(
            f"{served.launch.url}/generate",
            json={
                "input_ids": PROMPT,
                "lora_path": name or None,
                "sampling_params": {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True},
            },
            timeout=60,
        ).json()
        assert reply["output_ids"] == ids


def test_a_beam_search_with_an_adapter_finds_what_merged_weights_find(served: Served) -> None:
    draw = plain_draw(PROMPT, NUM_TOKENS)
    found = {}
    for name in ("", "sql"):
        model = served.reference(name)
        asked = LoRARequest(name, 1) if name else None
        completion = served.client.generate(PROMPT, draw.sampling, lora_request=asked)
        found[name] = found_of(completion.outputs)
        assert_same(found[name], searched(model, draw, [model.generation_config.eos_token_id]), draw)
    assert found[""] != found["sql"]


def test_prefixes_are_shared_within_an_adapter_and_with_nobody_else(served: Served) -> None:
    prompt = list(range(300, 380))
    cached = [served.generate(name, prompt).usage.cached_tokens for name in ("", "sql", "chat") * 2]
    assert cached[:3] == [0, 0, 0]
    assert cached[3:] == [cached[3]] * 3
    assert cached[3] >= 64


def test_more_adapters_than_slots_at_once_each_with_its_own_answer(served: Served) -> None:
    asked = [name for name in ("", *NAMES) for _ in range(4)]
    prompts = [list(range(500 + 7 * number, 540 + 7 * number)) for number in range(len(asked))]
    with ThreadPoolExecutor(len(asked)) as threads:
        found = list(threads.map(served.generate, asked, prompts))
    for name, prompt, completion in zip(asked, prompts, found, strict=True):
        served.check(name, prompt, completion.outputs[0].token_ids)
    info = served.info()
    assert info["max_loras"] == 2
    assert info["num_adapter_loads"] >= 4
    assert info["num_adapter_evictions"] >= 2
    assert info["adapter_requests"]["third"] >= 4


def test_several_prompts_of_one_call_have_an_adapter_each(served: Served) -> None:
    prompts = [list(range(600 + 7 * number, 640 + 7 * number)) for number in range(3)]
    asked = [LoRARequest("sql", 1), None, LoRARequest("chat", 1)]
    found = served.client.generate(prompts, GREEDY, lora_request=asked)
    names = ("sql", "", "chat")
    for name, prompt, completion in zip(names, prompts, found, strict=True):
        served.check(name, prompt, completion.outputs[0].token_ids)


@pytest.mark.parametrize("num_clients", [40, pytest.param(200, marks=pytest.mark.full)])
def test_three_adapters_in_turn_for_two_slots_four_outputs_each(served: Served, num_clients: int) -> None:
    """All at once, in chunks, in a pool that takes rows back: each has what merged weights give."""
    prompts = [list(range(700 + 9 * number, 850 + 9 * number)) for number in range(3)]
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, n=4)
    before = served.info()
    found: dict[tuple[str, int], set[tuple[int, ...]]] = {}

    def ask(client: int) -> None:
        name, number = NAMES[client % 3], client // 3 % 3
        completion = served.client.generate(
            prompts[number], sampling, lora_request=LoRARequest(name, 1), timeout=240
        )
        assert len(completion.outputs) == 4
        texts = {tuple(output.token_ids) for output in completion.outputs}
        found.setdefault((name, number), set()).update(texts)

    with ThreadPoolExecutor(num_clients) as threads:
        assert len(list(threads.map(ask, range(num_clients)))) == num_clients
    assert len(found) == 9
    for (name, number), texts in found.items():
        (ids,) = texts
        served.check(name, prompts[number], ids)
    info = served.info()
    assert info["num_retracted"] > before["num_retracted"], "nobody had to give way"
    assert info["num_adapter_evictions"] > before["num_adapter_evictions"]
    assert info["num_adapters_in_use"] == 0


def test_a_directory_of_the_callers_own(served: Served) -> None:
    own = LoRARequest("own", 7, str(served.path("own")))
    served.check("own", PROMPT, served.client.generate(PROMPT, GREEDY, lora_request=own).outputs[0].token_ids)
    refused = {
        LoRARequest("own", 7, str(served.path("sql"))): "id 7 was used with another path",
        LoRARequest("none", 8): "there is no adapter 'none'",
        LoRARequest("gone", 9, str(served.folder / "gone")): "no such directory",
        LoRARequest("zero", 0, str(served.path("own"))): "lora_int_id must be an integer from 1",
        LoRARequest("a/b", 3, str(served.path("own"))): "without a slash",
    }
    for request, reason in refused.items():
        with pytest.raises(InvalidRequest, match=reason):
            served.client.generate(PROMPT, GREEDY, lora_request=request)
    served.check("sql", PROMPT, served.generate("sql").outputs[0].token_ids)


def test_other_weights_in_the_same_directory_are_another_version(served: Served) -> None:
    path = served.folder / "changing"
    asked = LoRARequest("changing", 11, str(path))
    for seed, is_known in ((21, False), (22, False), (21, True)):
        save(served.base, path, seed)
        os.utime(path / "adapter_model.safetensors", ns=(seed, seed))
        completion = served.client.generate(PROMPT, GREEDY, lora_request=asked)
        served.check("changing", PROMPT, completion.outputs[0].token_ids)
        assert bool(completion.usage.cached_tokens) == is_known


def test_an_adapter_that_does_not_fit_the_model_is_refused(served: Served) -> None:
    write_adapter(served.folder / "wide", {"model.layers.0.self_attn.q_proj": (99, 256)})
    with pytest.raises(InvalidRequest, match="q_proj"):
        served.client.generate(
            PROMPT, GREEDY, lora_request=LoRARequest("wide", 12, str(served.folder / "wide"))
        )
    served.check("", PROMPT, served.generate("").outputs[0].token_ids)


def test_adapters_come_back_by_themselves_when_the_worker_is_killed(served: Served) -> None:
    num_tokens = 400
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    with ThreadPoolExecutor(2) as threads:
        calls = [
            threads.submit(
                served.client.generate, PROMPT, sampling, lora_request=LoRARequest(name, 1), timeout=120
            )
            for name in ("sql", "fourth")
        ]
        stream = served.client.stream(PROMPT, sampling, lora_request=LoRARequest("chat", 1))
        deltas = iter(stream)
        ids = list(next(deltas).token_ids)
        os.kill(served.launch.pid_of("worker"), signal.SIGKILL)
        for delta in deltas:
            ids += delta.token_ids
        found = [call.result().outputs[0].token_ids for call in calls]
    for name, tokens in zip(("chat", "sql", "fourth"), (ids, *found), strict=True):
        served.check(name, PROMPT, tokens, num_tokens)
