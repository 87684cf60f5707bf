"""The kernels compiled for Hopper, without a GPU: what they need is what was recorded, and nothing spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RECORDED = Path(__file__).with_name("sm90.json")


@pytest.fixture(scope="module")
def tables() -> tuple[dict[str, Any], dict[str, Any]]:
    """(now, recorded)."""
    # A process of its own: in this one the kernels were defined for the interpreter.
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_DEFAULT_FP_FUSION"] = "1"
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.compile_kernels", "--json"],
        env=environment,
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout), json.loads(RECORDED.read_text())


def test_every_kernel_compiles_and_none_spills(tables: tuple[dict[str, Any], dict[str, Any]]) -> None:
    now, recorded = tables
    assert sorted(now["kernels"]) == sorted(recorded["kernels"])
    assert {name: use["stack"] for name, use in now["kernels"].items() if use["stack"]} == {}


def test_no_kernel_needs_more_than_was_recorded(tables: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """To record anew: python -m benchmarks.gpu.compile_kernels --json > tests/cpu/triton/sm90.json."""
    now, recorded = tables
    # Another compiler allocates otherwise; an eighth more would still be a surprise.
    slack = 1.0 if now["triton"] == recorded["triton"] else 1.125
    for name, use in now["kernels"].items():
        for what in ("registers", "shared"):
            limit = recorded["kernels"][name][what] * slack
            assert use[what] <= limit, f"{name}: {use[what]} {what}, recorded were {limit:.0f}"
