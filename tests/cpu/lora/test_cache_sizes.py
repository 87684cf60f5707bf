"""Sizes of the caches of adapters in a whole launch: pages of the device, and what the host keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from carousel import Client, LoraConfig, LoRARequest, SamplingParams
from tests.harness.adapters import write_adapter
from tests.harness.ring.launched import Launched, launched

NUM_LAYERS = 6
SHAPES = {
    f"model.layers.{layer}.{name}": shape
    for layer in range(NUM_LAYERS)
    for name, shape in {
        "self_attn.q_proj": (256, 256),
        "self_attn.k_proj": (128, 256),
        "self_attn.v_proj": (128, 256),
        "self_attn.o_proj": (256, 256),
        "mlp.gate_proj": (704, 256),
        "mlp.up_proj": (704, 256),
        "mlp.down_proj": (256, 704),
    }.items()
}
PAGE_ROWS = 8 * len(SHAPES)
PROMPT = list(range(100, 130))
SHORT = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)


def device(client: Client) -> tuple[int, int, int]:
    """Return pages that are taken, adapters, and loads so far."""
    info = client.server_info()
    return info["num_device_pages"], info["num_adapters"], info["num_adapter_loads"]


def test_pages_follow_the_rank_and_two_fit_where_two_should(tmp_path: Path) -> None:
    for number, rank in enumerate((8, 8, 8, 16, 1), 1):
        write_adapter(tmp_path / f"a{number}", SHAPES, rank=rank, seed=number)
    with (
        launched("--enable-lora", "--lora-device-rows", str(3 * PAGE_ROWS - 1)) as launch,
        Client(launch.run_dir) as client,
    ):

        def ask(number: int) -> None:
            asked = LoRARequest(f"a{number}", number, str(tmp_path / f"a{number}"))
            client.generate(PROMPT, SHORT, lora_request=asked)

        info = client.server_info()
        assert (info["max_device_pages"], info["adapter_page_rows"]) == (2, PAGE_ROWS)
        for number in (1, 2, 1, 2):
            ask(number)
        assert device(client) == (2, 2, 2), "two of rank 8 stay"
        ask(3)
        assert device(client) == (2, 2, 3), "the third takes the place of one of them"
        ask(4)
        assert device(client) == (2, 1, 4), "one of rank 16 takes both pages"
        ask(5)
        assert device(client) == (1, 1, 5), "one of rank 1 takes a page"


def test_a_share_of_the_memory_is_pages() -> None:
    with (
        launched("--enable-lora", "--lora-device-percent", "0.001", "--max-total-tokens", "4096") as launch,
        Client(launch.run_dir) as client,
    ):
        info = client.server_info()
        row_bytes = 2 * (256 + 704)
        memory = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
        size = info["max_device_pages"] * PAGE_ROWS * row_bytes
        assert 0 < size <= 0.001 * memory


def resident_bytes(launch: Launched) -> int:
    """Return the memory that is these processes' own, without the files that they map."""
    total = 0
    for role in ("tokenizer", "scheduler"):
        status = Path(f"/proc/{launch.pid_of(role)}/status").read_text()
        total += int(status.split("RssAnon:")[1].split()[0]) * 1024
    return total


def test_no_process_grows_by_what_the_host_keeps(tmp_path: Path) -> None:
    """Ten adapters of 6 MB come, and the cache has room for five; the worker has what lies on the device."""
    write_adapter(tmp_path / "large", SHAPES, rank=48)
    weights: dict[str, Any] = dict(load_file(tmp_path / "large" / "adapter_model.safetensors"))
    config = json.loads((tmp_path / "large" / "adapter_config.json").read_text())
    size = sum(array.nbytes for array in weights.values())
    with (
        launched(
            "--enable-lora", "--lora-host-cache-size", str(5 * size + (1 << 20)), "--max-loras", "1"
        ) as launch,
        Client(launch.run_dir) as client,
    ):
        client.generate(PROMPT, SHORT, lora_config=LoraConfig(1, weights, config))
        before = resident_bytes(launch)
        for task_id in range(2, 11):
            client.generate(PROMPT, SHORT, lora_config=LoraConfig(task_id, weights, config))
        info = client.server_info()
        assert info["num_host_adapters"] == 5
        assert info["num_host_evictions"] == 5
        assert info["host_adapter_bytes"] <= info["max_host_adapter_bytes"]
        kept = (launch.run_dir / "adapters").rglob("adapter_model.safetensors")
        assert len([path for path in kept if ".gone" not in str(path)]) == 5
        assert resident_bytes(launch) - before < size
