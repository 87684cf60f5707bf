"""Host time of launches: the calls that are timed, and Triton's own launch path without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.launch_calls import LAYERS, TINY, launch_calls
from benchmarks.gpu.launch_cost import launch_costs, of_layers
from model_worker.device import make_device


def test_every_call_launches_its_kernels_and_has_a_cost() -> None:
    device = make_device("cpu", threaded=False)
    with torch.inference_mode():
        calls = launch_calls(device, torch.float32, TINY)
        costs = launch_costs(device, calls, num_calls=1, num_batches=1)
    kernels = {each["call"]: [name for name in each["launches"] if name.startswith("_")] for each in costs}
    assert kernels["decode attention, two splits"] == ["_attend_split", "_merge_splits"]
    assert kernels["experts"] == ["_sort", "_grouped_product", "_gate", "_grouped_product"]
    assert kernels["truncation and draw"] == ["_extremes", "_count", "_best_in_block", "_best_of_row"]
    assert all(kernels.values())
    layers = of_layers(costs)
    assert layers.keys() == LAYERS.keys()
    assert layers["chunk layer"] > sum(each["us"] for each in costs if each["call"] == "extend attention") > 0


@pytest.mark.full
def test_launches_are_timed_without_a_gpu() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.launch_cost", "--call", "embedding", "--json"],
        env={**environment, "TRITON_DEFAULT_FP_FUSION": "1"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    (cost,) = json.loads(run.stdout)["calls"]
    assert cost["launches"] == ["_embed"]
    assert cost["us"] > 0
