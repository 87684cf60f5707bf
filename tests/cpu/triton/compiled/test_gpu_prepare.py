"""Kernels compiled before anything is launched are those that launches look for."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests.cpu.triton.compiled import prepared_launches
from tests.cpu.triton.compiled.compiling_process import output_of
from tests.harness.pretended_gpu import pretended_gpu


def run(cache: Path, *arguments: str) -> str:
    """Return the output of a module whose kernels are compiled into that cache."""
    return output_of(*arguments, TRITON_CACHE_DIR=str(cache), TRITON_DEFAULT_FP_FUSION="1")


def test_a_launch_of_what_was_prepared_compiles_nothing(tmp_path: Path) -> None:
    with pretended_gpu() as gpu, torch.inference_mode():
        prepared_launches.launch("cuda")
    file, cache = tmp_path / "variants", tmp_path / "cache"
    file.write_text("\n".join(list(gpu.compiled)[:2]))
    options = ("--capability", "9.0", "--processes", "1", "--variants", str(file))
    assert "2 variants" in run(cache, "benchmarks.gpu.prepare", *options)
    hits = json.loads(run(cache, "tests.cpu.triton.compiled.prepared_launches"))
    assert hits == [True, True, False], "the third was not prepared"
