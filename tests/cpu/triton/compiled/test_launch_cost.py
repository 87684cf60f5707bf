"""Host time of launches, by Triton's own launch path and no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.full
def test_launches_are_timed_without_a_gpu() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.kernels.launch_cost", "--call", "embedding", "--json"],
        env={**environment, "TRITON_DEFAULT_FP_FUSION": "1"},
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    (cost,) = json.loads(run.stdout)["calls"]
    assert cost["launches"] == ["_embed"]
    assert cost["us"] > 0
