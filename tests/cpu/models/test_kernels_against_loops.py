"""Every C++ kernel against scalar loops, by a program without Python (tests/cpp); on aarch64, too."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from model_worker.kernels.native.build import COMPILERS, FLAGS, SOURCE_DIR
from tests.harness.models.native import needs_compiler

PROGRAM = Path(__file__).parents[2] / "cpp"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
# Where a pair is passed changed with GCC 10, which GCC says each time.
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-psabi")
COMPILE_TIMEOUT_S, RUN_TIMEOUT_S = 300, 120

pytestmark = pytest.mark.full


def _run(compiler: str, flags: tuple[str, ...], program: Path, emulator: tuple[str, ...] = ()) -> str:
    sources = [*sorted(PROGRAM.glob("*.cpp")), SOURCE_DIR / "team.cpp", SOURCE_DIR / "truncate.cpp"]
    folders = ["-I", str(SOURCE_DIR), "-I", str(PROGRAM)]
    command = [compiler, *FLAGS, *WARNINGS, *flags, *folders, *map(str, sources), "-o", str(program)]
    compiled = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    assert compiled.returncode == 0, compiled.stderr
    ran = subprocess.run(
        [*emulator, str(program)], capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@needs_compiler
def test_the_portable_kernels_equal_scalar_loops(tmp_path: Path) -> None:
    compiler = next(filter(shutil.which, COMPILERS))
    assert "checks passed" in _run(compiler, (), tmp_path / "kernels")


@pytest.mark.skipif(
    not (shutil.which(COMPILER) and shutil.which(EMULATOR)),
    reason=f"there is no {COMPILER} or {EMULATOR}: apt-get install g++-aarch64-linux-gnu qemu-user",
)
def test_the_kernels_on_aarch64_equal_scalar_loops(tmp_path: Path) -> None:
    said = _run(COMPILER, ("-static",), tmp_path / "kernels", (EMULATOR,))
    assert "checks passed, 4 lanes" in said
