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


# Another compiler allocates otherwise; an eighth more than all that are known would still be a surprise.
UNKNOWN_COMPILER_SLACK = 1.125


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    # A process of its own: in this one the kernels were defined for the interpreter.
    ours = ("TRITON_INTERPRET", "TRITON_DEFAULT_FP_FUSION")
    environment = {key: value for key, value in os.environ.items() if key not in ours}
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.kernels.compile_kernels", "--json"],
        env=environment,
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    # Triton warns of it where nobody has set it.
    assert "TRITON_DEFAULT_FP_FUSION" not in run.stderr, run.stderr[-4000:]
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def records() -> dict[str, dict[str, Any]]:
    """By compiler."""
    return json.loads(RECORDED.read_text())


def test_every_kernel_compiles_and_none_spills(
    compiled: dict[str, Any], records: dict[str, dict[str, Any]]
) -> None:
    for record in (compiled["kernels"], *records.values()):
        assert {name: use["stack"] for name, use in record.items() if use["stack"]} == {}


def test_no_kernel_needs_more_than_was_recorded(
    compiled: dict[str, Any], records: dict[str, dict[str, Any]]
) -> None:
    """To record anew: python -m benchmarks.gpu.kernels.compile_kernels --record
    tests/cpu/triton/compiled/sm90.json.
    """
    own = records.get(compiled["triton"])
    slack, known = (UNKNOWN_COMPILER_SLACK, list(records.values())) if own is None else (1.0, [own])
    for record in known:
        assert sorted(compiled["kernels"]) == sorted(record)
    for name, use in compiled["kernels"].items():
        for what in ("registers", "shared"):
            limit = slack * max(record[name][what] for record in known)
            assert use[what] <= limit, f"{name}: {use[what]} {what}, recorded were {limit:.0f}"
