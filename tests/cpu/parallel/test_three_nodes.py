"""A launch over three nodes of this machine, each with a rank: the reference's tokens, also after deaths."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from carousel import Client, SamplingParams
from runtime.settings.config import DEMO_MODEL
from tests.cpu.parallel.test_nodes_launch import TIMEOUT_S, streams_of
from tests.harness.models.plans import greedy_reference
from tests.harness.nodes import nodes
from tests.harness.ring.launched import is_alive, wait_until

PROMPT = list(range(100, 140))
NUM_TOKENS = 24


def save_model_of_three(path: Path) -> LlamaForCausalLM:
    """Save a random model whose heads three ranks can share, with the demo model's tokenizer."""
    for file in DEMO_MODEL.iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, path)
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=16,
        initializer_range=0.2,
        max_position_embeddings=1024,
    )
    model = LlamaForCausalLM(config).float().eval()
    model.save_pretrained(path)
    return model


@pytest.mark.full
def test_three_nodes_give_the_references_tokens_and_outlive_a_rank_and_a_node(tmp_path: Path) -> None:
    model = save_model_of_three(tmp_path)
    wanted = greedy_reference(model, PROMPT, NUM_TOKENS)
    settings = ("--model", str(tmp_path), "--dtype", "float32", "--no-http", "--max-total-tokens", "2048")
    with nodes(*settings, count=3) as three, Client(three.run_dir) as client:
        last = three.rest[0]

        def tokens() -> list[int]:
            sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
            return list(client.generate(PROMPT, sampling, timeout=TIMEOUT_S).token_ids)

        def kill_node() -> None:
            last.process.kill()
            three.rest[0] = three.start(2)

        assert tokens() == wanted
        streams = streams_of(client, lambda: None)
        rank = three.pid_of_rank(2)
        assert streams_of(client, lambda: os.kill(rank, signal.SIGKILL)) == streams
        assert streams_of(client, kill_node) == streams
        assert tokens() == wanted
        pids = [each for part in (three.zero, three.other, *three.rest) for each in part.pids()]
        assert three.zero.stop() == 0
        wait_until(lambda: not any(is_alive(pid) for pid in pids), 10.0, "all processes end")
        last.close()
