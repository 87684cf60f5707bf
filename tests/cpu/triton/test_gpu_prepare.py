"""Kernels compiled before anything is launched are those that launches look for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.cpu.triton import prepared_launches
from tests.pretended_gpu import pretended_gpu

REPOSITORY = Path(__file__).parents[3]


def run(cache: Path, *arguments: str) -> str:
    """The output of a module in a process whose kernels are compiled, into that cache."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        env=environment,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_a_launch_of_what_was_prepared_compiles_nothing(tmp_path: Path) -> None:
    with pretended_gpu() as gpu, torch.inference_mode():
        prepared_launches.launch("cuda")
    file, cache = tmp_path / "variants", tmp_path / "cache"
    file.write_text("\n".join(list(gpu.compiled)[:2]))
    options = ("--capability", "9.0", "--processes", "1", "--variants", str(file))
    assert "2 variants" in run(cache, "benchmarks.gpu.prepare", *options)
    hits = json.loads(run(cache, "tests.cpu.triton.prepared_launches"))
    assert hits == [True, True, False], "the third was not prepared"
