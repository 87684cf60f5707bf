"""What tests/gpu launches, as it is launched, compiles for the capabilities that the product promises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: in this one kernels are interpreted, and its GPU is none."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        env=environment,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_every_launch_compiles_as_it_is_launched(tmp_path: Path) -> None:
    """Types, alignment and constants are the launch's own, not those of a list that somebody keeps."""
    file = tmp_path / "variants"
    tested = run("pytest", "-q", "-p", "no:cacheprovider", "--pretend", f"--variants={file}", "tests/gpu")
    assert tested.returncode == 0, tested.stdout[-4000:]
    assert len(file.read_text().splitlines()) > 50
    for capability in ("8.0", "8.9", "9.0"):
        compiled = run("benchmarks.gpu.prepare", "--variants", str(file), "--capability", capability)
        assert compiled.returncode == 0, compiled.stdout[-4000:] + compiled.stderr[-4000:]
