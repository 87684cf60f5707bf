"""Tiles of the attention kernels fit every device that is served: by their own estimate, and as compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.fits import DTYPES, HEAD_DIMS
from benchmarks.gpu.kernels.attention_variants import GPUS
from model_worker.kernels.triton.tiles import (
    LEAST,
    Gpu,
    Heads,
    decode_shared_memory,
    decode_tile,
    extend_shared_memory,
    extend_tile,
    gpu_of,
)
from runtime.base.errors import ConfigError


def test_what_is_nearest_to_its_limit_fits_as_compiled_and_is_no_more_than_estimated() -> None:
    # A process of its own: in this one the kernels were defined for the interpreter.
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.fits", "--json"],
        env=environment,
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr[-4000:]
    seen = [json.loads(line) for line in run.stdout.splitlines()]
    assert {row["capability"] for row in seen} == {80, 89, 90}
    for row in seen:
        assert row["shared"] <= min(row["estimate"], row["limit"]), row
        assert row["stack"] == 0, row
        # Keys and values of the next block are on their way while one is computed.
        assert row["pending"] > 0, row


@pytest.mark.parametrize("gpu", set(GPUS.values()))
def test_there_is_a_tile_for_every_device_head_and_dtype(gpu: Gpu) -> None:
    for head_dim, (dtype, kv_dtype), group in product((16, *HEAD_DIMS), DTYPES, (1, 4, 16)):
        heads = Heads(group, head_dim, dtype, kv_dtype)
        assert decode_shared_memory(decode_tile(gpu, heads), heads) <= gpu.shared_memory
        assert extend_shared_memory(extend_tile(gpu, heads), heads, gpu) <= gpu.shared_memory


def test_decode_blocks_are_short_enough_for_two_programs_on_a_multiprocessor() -> None:
    bfloat16 = Heads(4, 128, torch.bfloat16, torch.bfloat16)
    assert decode_tile(GPUS[90], bfloat16).block_n == 64
    assert decode_tile(GPUS[89], bfloat16).block_n == 32
    assert decode_tile(GPUS[80], bfloat16._replace(head_dim=256)).block_n == 32
    float32 = Heads(4, 256, torch.float32, torch.float32)
    assert decode_tile(GPUS[89], float32).block_n == 16


def test_no_device_has_less_than_what_the_interpreter_keeps_to() -> None:
    assert min(gpu.shared_memory for gpu in GPUS.values()) == LEAST.shared_memory
    assert gpu_of(torch.device("cpu")) == LEAST


def test_what_fits_no_tile_is_refused_with_what_to_do() -> None:
    large = Heads(8, 512, torch.float32, torch.float32)
    for choose in (decode_tile, extend_tile):
        with pytest.raises(ConfigError, match=r"heads of 512 in float32 .* 99 KiB .* --dtype bfloat16"):
            choose(LEAST, large)
    extend_tile(LEAST, large._replace(dtype=torch.bfloat16, kv_dtype=torch.bfloat16))
