"""Prompt adapters and prompt tuning in a whole launch, against the reference with the vectors in front."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from carousel import (
    Client,
    InvalidRequest,
    LoRARequest,
    PromptAdapterRequest,
    PromptTuningConfig,
    SamplingParams,
)
from tests.harness.models.adapted import ADAPTERS, merged, save_adapter
from tests.harness.ring.launched import ROOT, Launched, launched

NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPT = list(range(100, 140))
WIDTH = 256


class Served(NamedTuple):
    launch: Launched
    client: Client
    folder: Path
    base: PreTrainedModel
    vocab_size: int

    def wanted(self, table: torch.Tensor, ids: list[int], model: PreTrainedModel | None = None) -> list[int]:
        """Return the reference's greedy tokens; ids from the vocabulary's size on are rows of the table."""
        model = model or self.base
        embed = model.get_input_embeddings()
        with torch.no_grad():
            all_rows = torch.cat([embed.weight, table])
            found = model.generate(
                inputs_embeds=all_rows[ids][None],
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                do_sample=False,
                max_new_tokens=NUM_TOKENS,
                min_new_tokens=NUM_TOKENS,
                repetition_penalty=1.0,
            )
        return list(found[0].tolist())

    def table(self, num_tokens: int, seed: int) -> torch.Tensor:
        """Vectors like those of tokens, and of none of them."""
        rng = torch.Generator().manual_seed(seed)
        weight = self.base.get_input_embeddings().weight.detach()
        picked = torch.randint(0, len(weight), (num_tokens,), generator=rng)
        noise = 0.3 * weight.std() * torch.randn(num_tokens, WIDTH, generator=rng)
        table: torch.Tensor = weight[picked] + noise
        return table.contiguous()

    def directory(self, name: str, table: torch.Tensor, **config: Any) -> Path:
        path = self.folder / name
        path.mkdir(exist_ok=True)
        said = {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": len(table), "token_dim": table.shape[1]}
        (path / "adapter_config.json").write_text(json.dumps({**said, "task_type": "CAUSAL_LM", **config}))
        save_file({"prompt_embeddings": table}, path / "adapter_model.safetensors")
        return path

    def generate(self, ids: list[int], **options: Any) -> Any:
        return self.client.generate(ids, options.pop("sampling", GREEDY), **options)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    base = AutoModelForCausalLM.from_pretrained(ROOT / "carousel" / "demo_model", dtype=torch.float32)
    arguments = ("--dtype", "float32", "--enable-lora", "--max-loras", "4", "--chunked-prefill-size", "32")
    with launched(*arguments) as launch, Client(launch.run_dir) as client:
        folder = tmp_path_factory.mktemp("prompts")
        yield Served(launch, client, folder, base, base.config.vocab_size)


def test_a_directory_stands_in_front_of_the_prompt(served: Served) -> None:
    """Across chunks of 32; again, where its prefix is in the cache; beside rows without it."""
    tables = {name: served.table(num, seed) for seed, (name, num) in enumerate({"a": 20, "b": 45}.items())}
    asked = {
        name: PromptAdapterRequest(name, number, str(served.directory(name, table)))
        for number, (name, table) in enumerate(tables.items(), 1)
    }
    plain = served.generate(PROMPT).outputs[0].token_ids
    wanted = {
        name: served.wanted(table, [*range(served.vocab_size, served.vocab_size + len(table)), *PROMPT])
        for name, table in tables.items()
    }
    assert len({tuple(ids) for ids in (plain, *wanted.values())}) == 3
    for again in range(2):
        for name, request in asked.items():
            completion = served.generate(PROMPT, prompt_adapter_request=request)
            assert completion.outputs[0].token_ids == wanted[name]
            assert completion.usage.prompt_tokens == len(PROMPT)
            assert (completion.usage.cached_tokens > 0) == bool(again)
            assert completion.usage.cached_tokens <= len(PROMPT)
    assert served.generate(PROMPT).outputs[0].token_ids == plain


def test_vectors_come_with_a_request_and_stand_where_its_ids_say(served: Served) -> None:
    table, first = served.table(5, 7), served.vocab_size
    ids = [*PROMPT[:10], first + 4, first, *PROMPT[10:], first + 1, 77]
    config = PromptTuningConfig(table)
    completion = served.generate(ids, prompt_tuning_config=config)
    assert completion.outputs[0].token_ids == served.wanted(table, ids)
    assert completion.usage.prompt_tokens == len(ids) - 3
    assert (
        served.generate(ids, prompt_tuning_config=PromptTuningConfig(table.numpy())).usage.cached_tokens > 0
    )
    extra = PromptTuningConfig(table, [5] * len(ids))
    assert served.generate(ids, prompt_tuning_config=extra).usage.cached_tokens == 0
    assert served.generate(ids, prompt_tuning_config=extra).usage.cached_tokens > 0
    other = PromptTuningConfig(table, [6] * len(ids))
    assert served.generate(ids, prompt_tuning_config=other).usage.cached_tokens == 0


def test_a_table_and_a_lora_together(served: Served) -> None:
    path = served.folder / "lora"
    save_adapter(served.base, ADAPTERS["rank_8"], path, 3)
    table, first = served.table(6, 9), served.vocab_size
    ids = [*range(first, first + 6), *PROMPT]
    completion = served.generate(
        ids, prompt_tuning_config=PromptTuningConfig(table), lora_request=LoRARequest("lora", 9, str(path))
    )
    assert completion.outputs[0].token_ids == served.wanted(table, ids, merged(served.base, path))


def test_it_goes_on_after_the_worker_was_killed_and_with_penalties(served: Served) -> None:
    table, first = served.table(8, 11), served.vocab_size
    ids = [*range(first, first + 8), *PROMPT]
    config = PromptTuningConfig(table)
    sampling = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, repetition_penalty=1.2)
    wanted = served.generate(ids, sampling=sampling, prompt_tuning_config=config).outputs[0].token_ids
    deltas = iter(served.client.stream(ids, sampling, prompt_tuning_config=config))
    found = list(next(deltas).token_ids)
    os.kill(served.launch.pid_of("worker"), signal.SIGKILL)
    for delta in deltas:
        found += delta.token_ids
    assert found == wanted


def test_what_is_wrong_is_refused_by_name(served: Served) -> None:
    table, first = served.table(4, 13), served.vocab_size
    good = PromptTuningConfig(table)
    for ids, options, named in (
        ([5, first + 4], {"prompt_tuning_config": good}, f"token id {first + 4} is not between"),
        ([5, first], {}, f"token id {first} is not between"),
        ([5, first], {"prompt_tuning_config": PromptTuningConfig(table, [1])}, "input_token_extra_ids"),
        ([5], {"prompt_tuning_config": PromptTuningConfig(table[:, :8].contiguous())}, "vectors of 8"),
        ([5], {"prompt_tuning_config": PromptTuningConfig(np.zeros((2, WIDTH)))}, "float64"),
        ([5], {"prompt_tuning_config": PromptTuningConfig(table[0])}, r"an array \[k, hidden size\]"),
        ([5], {"prompt_tuning_config": PromptTuningConfig(table * float("nan"))}, "no finite numbers"),
        ([5], {"prompt_adapter_request": PromptAdapterRequest("x", 0, "/x")}, "prompt_adapter_id"),
        ([5], {"prompt_adapter_request": PromptAdapterRequest("x", 50, "/none")}, "no such directory"),
    ):
        with pytest.raises(InvalidRequest, match=named):
            served.generate(ids, **options)
    for kind in ("PREFIX_TUNING", "P_TUNING", "LORA"):
        path = served.directory(kind, table, peft_type=kind)
        asked = PromptAdapterRequest(kind, 60 + len(kind), str(path))
        with pytest.raises(InvalidRequest, match=f"peft_type: '{kind}' is not served"):
            served.generate(PROMPT, prompt_adapter_request=asked)
    sampling = SamplingParams(max_tokens=2, prompt_logprobs=1)
    with pytest.raises(InvalidRequest, match="prompt_logprobs: virtual tokens have none"):
        served.generate([5, first], sampling=sampling, prompt_tuning_config=good)
    assert served.generate([5, first], prompt_tuning_config=good).outputs[0].token_ids
