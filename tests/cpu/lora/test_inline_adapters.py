"""Adapters whose weights come with requests, in a whole launch: from this machine, over TCP, by id alone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.numpy import load_file

from carousel import (
    AdapterNotResident,
    AsyncClient,
    Client,
    GenerationExecutor,
    GenerationRequest,
    InvalidRequest,
    LoraConfig,
    LoRARequest,
    SamplingParams,
)
from runtime.wire.plan import MAX_PIECE_BYTES
from tests.harness.adapters import write_adapter
from tests.harness.ring.launched import Launched, free_ports, launched

SHAPES = {f"model.layers.{layer}.self_attn.q_proj": (256, 256) for layer in range(6)}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPT = list(range(100, 160))
ROWS_OF_EACH = 8 * len(SHAPES)


class Served(NamedTuple):
    launch: Launched
    client: Client
    over_tcp: Client
    folder: Path

    def directory(self, seed: int, **config: Any) -> Path:
        path = self.folder / f"adapter{seed}-{len(config)}"
        write_adapter(path, SHAPES, seed=seed, size=3.0, **config)
        return path

    def wanted(self, seed: int, number: int) -> list[int]:
        """Return what the same weights give as a directory."""
        asked = LoRARequest(f"directory{seed}", number, str(self.directory(seed)))
        return self.client.generate(PROMPT, GREEDY, lora_request=asked).outputs[0].token_ids


def inline(path: Path, task_id: int) -> LoraConfig:
    config = json.loads((path / "adapter_config.json").read_text())
    return LoraConfig(task_id, load_file(path / "adapter_model.safetensors"), config)


def ids(client: Client, config: LoraConfig) -> list[int]:
    return client.generate(PROMPT, GREEDY, lora_config=config).outputs[0].token_ids


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Three of rank 8 fit, by rows."""
    address = f"tcp://127.0.0.1:{free_ports(2)}"
    page_rows = 8 * 7 * 6
    arguments = (
        *("--dtype", "float32", "--enable-lora", "--zmq-bind", address, "--max-lora-rank", "64"),
        *("--lora-host-rows", str(3 * page_rows)),
    )
    with (
        launched(*arguments) as launch,
        Client(launch.run_dir) as client,
        Client(address, curve_dir=launch.run_dir / "keys" / "client") as over_tcp,
    ):
        yield Served(launch, client, over_tcp, tmp_path_factory.mktemp("adapters"))


def test_weights_come_once_and_the_id_alone_follows(served: Served) -> None:
    with pytest.raises(AdapterNotResident, match="send them again") as caught:
        ids(served.client, LoraConfig(1))
    assert caught.value.code == "adapter_not_resident"
    wanted = served.wanted(1, 100)
    for task_id, client in ((1, served.client), (2, served.over_tcp)):
        assert ids(client, inline(served.directory(1), task_id)) == wanted
        for other in (served.client, served.over_tcp):
            assert ids(other, LoraConfig(task_id)) == wanted
    with pytest.raises(InvalidRequest, match="stands for other weights"):
        ids(served.client, inline(served.directory(9), 1))
    assert ids(served.client, LoraConfig(1)) == wanted


def test_the_least_recently_used_goes_and_comes_again_with_its_weights(served: Served) -> None:
    wanted = served.wanted(3, 101)
    configs = {task_id: inline(served.directory(3), task_id) for task_id in (31, 32, 33, 34)}
    for task_id in (31, 32, 33):
        assert ids(served.client, configs[task_id]) == wanted
    ids(served.client, LoraConfig(31))
    ids(served.client, configs[34])
    with pytest.raises(AdapterNotResident):
        ids(served.client, LoraConfig(32))
    for task_id in (31, 33, 34):
        assert ids(served.client, LoraConfig(task_id)) == wanted
    info = served.client.server_info()
    assert (info["num_host_adapters"], info["num_host_pages"], info["max_host_pages"]) == (3, 3, 3)
    completion = served.over_tcp.generate(PROMPT, GREEDY, lora_config=configs[32])
    assert completion.outputs[0].token_ids == wanted
    assert completion.usage.cached_tokens > 0, "the same weights find what was computed with them"


def test_weights_longer_than_a_piece_and_of_bfloat16_travel_over_tcp(served: Served) -> None:
    path = served.folder / "large"
    shapes = {f"model.layers.{layer}.mlp.down_proj": (256, 704) for layer in range(6)}
    write_adapter(path, shapes, rank=64, seed=4)
    weights = {
        name: torch.from_numpy(array) for name, array in load_file(path / "adapter_model.safetensors").items()
    }
    config = json.loads((path / "adapter_config.json").read_text())
    narrow = LoraConfig(41, {name: tensor.bfloat16() for name, tensor in weights.items()}, config)
    wide = LoraConfig(42, weights, config)
    assert wide.packed is not None
    assert len(wide.packed.weights) > MAX_PIECE_BYTES
    assert len(ids(served.over_tcp, narrow)) == len(ids(served.over_tcp, wide)) == 12


def test_executor_and_event_loop_bring_weights_too(served: Served) -> None:
    wanted = served.wanted(5, 102)

    async def ask() -> list[int]:
        async with AsyncClient(served.launch.run_dir) as client:
            config = inline(served.directory(5), 51)
            return (await client.generate(PROMPT, GREEDY, lora_config=config)).outputs[0].token_ids

    assert asyncio.run(ask()) == wanted
    with GenerationExecutor.create(run_dir=served.launch.run_dir) as executor:
        config = inline(served.directory(5), 52)
        request = GenerationRequest(PROMPT, GREEDY, lora_config=config)
        assert executor.submit(request).result().outputs[0].token_ids == wanted
        number = executor.enqueue_request(GenerationRequest(PROMPT, GREEDY, lora_config=LoraConfig(52)))
        responses = executor.await_responses(number, timeout=60)
        assert [each.result.output_token_ids[0] for each in responses] == [wanted]


def test_what_cannot_be_served_is_refused_and_the_runtime_goes_on(served: Served) -> None:
    good = inline(served.directory(6), 61)
    wrong_shape = {name: array[:, :-1] if "lora_A" in name else array for name, array in good.weights.items()}  # type: ignore[union-attr]
    for weights, config, reason in (
        (wrong_shape, good.config, "is for a weight"),
        (good.weights, {**good.config, "r": 4}, "not of rank 4"),  # type: ignore[dict-item]
        (good.weights, {**good.config, "use_dora": True}, "DoRA"),  # type: ignore[dict-item]
        (good.weights, {"r": 8}, "target_modules"),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            ids(served.over_tcp, LoraConfig(62, weights, config))
        with pytest.raises(AdapterNotResident):
            ids(served.client, LoraConfig(62))
    assert len(ids(served.client, inline(served.directory(6), 62))) == 12


def test_kept_weights_outlive_scheduler_worker_and_tokenizer(served: Served) -> None:
    wanted = served.wanted(7, 103)
    assert ids(served.client, inline(served.directory(7), 71)) == wanted
    for role in ("scheduler", "worker", "tokenizer"):
        os.kill(served.launch.pid_of(role), signal.SIGKILL)
        assert ids(served.over_tcp, LoraConfig(71)) == wanted
