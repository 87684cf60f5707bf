"""A rank that loads its part of a sharded checkpoint needs little memory beyond it, whatever its dtype, and a
worker that has loaded a model little beyond its weights and its KV cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.bench_cpu_step import QWEN
from benchmarks.bench_load import run
from model_worker.loading.tensor_names import checkpoint_targets
from model_worker.models.parts import Parts
from model_worker.models.qwen2 import SPEC
from model_worker.models.transformer import CausalLM
from runtime.checkpoint.model_config import ModelConfig
from tests.harness.ring.launched import launched

MOST_OF_WEIGHTS = 1.2
MOST_OF_SERVED_WEIGHTS = 1.05
WORKER_BYTES = 200_000_000
"""Python, its libraries and what steps compute with."""
MAX_TOTAL_TOKENS = 4096


@pytest.mark.full  # 1 to 2 GiB are written and read again
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_loading_peaks_at_a_fifth_beyond_the_ranks_weights(dtype: torch.dtype) -> None:
    """Resident memory of a fresh process, mapped files included, as the kernel counts it."""
    ranks = run(1.0, 2, dtype)
    assert len(ranks) == 2
    for measured in ranks:
        assert 450 < measured["weights_mib"] < 600
        assert measured["weights_mib"] < measured["peak_mib"] <= MOST_OF_WEIGHTS * measured["weights_mib"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model of Qwen2.5-0.5B's shape."""
    folder = tmp_path_factory.mktemp("qwen-0.5b")
    (folder / "config.json").write_text(json.dumps({**QWEN, "dtype": "bfloat16"}))
    model = CausalLM(Parts(ModelConfig.from_path(folder), SPEC, torch.bfloat16, "meta"))
    shapes = {name: pieces[0].shape for name, pieces in checkpoint_targets(model).items()}
    weights = {name: torch.full(shape, 0.01, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    del weights
    yield folder
    (folder / "model.safetensors").unlink()


def weight_bytes(checkpoint: Path, dtype: str, quantization: str) -> int:
    """Bytes of the weights as they are computed with; of int8 ones with their scales."""
    total = 0
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 -- a file is no mapping
            shape = file.get_slice(name).get_shape()
            if quantization == "int8" and name.endswith(("proj.weight", "embed_tokens.weight")):
                total += prod(shape) + 4 * shape[0]
            else:
                total += prod(shape) * getattr(torch, dtype).itemsize
    return total


@pytest.mark.full  # a GiB is written, and read by each
@pytest.mark.parametrize(
    ("dtype", "quantization"), [("bfloat16", "auto"), ("float32", "auto"), ("bfloat16", "int8")]
)
def test_weights_stand_in_a_workers_memory_once(checkpoint: Path, dtype: str, quantization: str) -> None:
    kv_bytes = MAX_TOTAL_TOKENS * 24 * 2 * 2 * 64 * getattr(torch, dtype).itemsize
    arguments = (
        *("--device=cpu", f"--model={checkpoint}", f"--dtype={dtype}", f"--quantization={quantization}"),
        *("--skip-tokenizer-init", "--context-length=2048", "--max-running-requests=8"),
        f"--max-total-tokens={MAX_TOTAL_TOKENS}",
    )
    with launched(*arguments, is_cold=True) as launch:
        status = Path(f"/proc/{launch.pid_of('worker')}/status").read_text()
    resident = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmRSS:"))
    weights = weight_bytes(checkpoint, dtype, quantization)
    assert weights < resident <= MOST_OF_SERVED_WEIGHTS * weights + kv_bytes + WORKER_BYTES, (
        f"{(resident - weights - kv_bytes) >> 20} MiB beyond weights and KV cache"
    )
