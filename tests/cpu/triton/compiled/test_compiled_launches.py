"""Kernels of tests/gpu, as they are launched, compile for the capabilities that the product promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cpu.triton.compiled.compiling_process import output_of


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_every_launch_compiles_as_it_is_launched(tmp_path: Path) -> None:
    """Types, alignment and constants are the launch's own, not those of a list that somebody keeps."""
    file = tmp_path / "variants"
    output_of("pytest", "-q", "-p", "no:cacheprovider", "--pretend", f"--variants={file}", "tests/gpu")
    assert len(file.read_text().splitlines()) > 50
    for capability in ("8.0", "8.9", "9.0"):
        output_of("benchmarks.gpu.prepare", "--variants", str(file), "--capability", capability)
