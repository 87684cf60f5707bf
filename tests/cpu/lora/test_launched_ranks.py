"""Weights and vectors that come with requests, in a launch of two ranks: the tokens of the reference."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from carousel import Client, LoraConfig, PromptTuningConfig, SamplingParams
from tests.harness.models.adapted import ADAPTERS, merged, save_adapter
from tests.harness.ring.launched import ROOT, launched

NUM_TOKENS = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPT = list(range(100, 140))
NUM_VECTORS = 6


def test_two_ranks_take_weights_and_tables_and_keep_them_when_one_dies(tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(ROOT / "carousel" / "demo_model", dtype=torch.float32)
    save_adapter(base, ADAPTERS["patterns"], tmp_path / "adapter", 3)
    said = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    lora = LoraConfig(1, load_file(tmp_path / "adapter" / "adapter_model.safetensors"), said)
    embedded = base.get_input_embeddings().weight.detach()
    noise = torch.randn(NUM_VECTORS, embedded.shape[1], generator=torch.Generator().manual_seed(5))
    table = embedded[7 : 7 + NUM_VECTORS] + 0.3 * embedded.std() * noise
    first = base.config.vocab_size
    ids = [*range(first, first + NUM_VECTORS), *PROMPT]

    def wanted(asked: list[int], path: Path | None) -> list[int]:
        model = merged(base, path) if path else base
        found = model.generate(
            inputs_embeds=torch.cat([embedded, table])[asked][None],
            attention_mask=torch.ones(1, len(asked), dtype=torch.long),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            repetition_penalty=1.0,
        )
        return list(found[0].tolist())

    with torch.no_grad():
        of_lora = wanted(PROMPT, tmp_path / "adapter")
        of_table, of_both = wanted(ids, None), wanted(ids, tmp_path / "adapter")
    vectors = PromptTuningConfig(table)
    with (
        launched("--tp-size", "2", "--dtype", "float32", "--enable-lora", "--no-http") as launch,
        Client(launch.run_dir) as client,
    ):

        def check(config: LoraConfig) -> None:
            for asked, options, tokens in (
                (PROMPT, {"lora_config": config}, of_lora),
                (ids, {"prompt_tuning_config": vectors}, of_table),
                (ids, {"lora_config": config, "prompt_tuning_config": vectors}, of_both),
            ):
                completion = client.generate(asked, GREEDY, timeout=240, **options)
                assert completion.outputs[0].token_ids == tokens

        check(lora)
        os.kill(launch.pid_of("worker", 1), signal.SIGKILL)
        check(LoraConfig(1))
