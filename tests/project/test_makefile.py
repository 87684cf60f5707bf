"""Packages that make installs: serving gets no test tools, tests and checks get both, nothing comes twice.
Its commands keep bytecode.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.harness.sources import ROOT


def commands(target: str, venv: Path) -> list[str]:
    """Return the commands that make would run for the target."""
    # A make that runs this test has settings of its own for others below it.
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
    done = subprocess.run(
        ["make", "--dry-run", target, f"VENV={venv}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def installed(target: str, venv: Path) -> list[str]:
    return [line.split()[-1].strip('"') for line in commands(target, venv) if "pip install" in line]


@pytest.mark.parametrize(
    ("target", "wanted"),
    [("serve", "."), ("check", ".[test]"), ("test-unit", ".[test]"), ("bench", ".[test]")],
)
def test_a_target_installs_what_it_needs(target: str, wanted: str, tmp_path: Path) -> None:
    torch, package = installed(target, tmp_path)
    assert torch.startswith("torch==")
    assert package == wanted
    lines = commands(target, tmp_path)
    assert any(line.startswith('echo "Installing into') and "GB" in line for line in lines)
    assert not any("--quiet" in line for line in lines)


def test_nothing_is_installed_a_second_time(tmp_path: Path) -> None:
    (tmp_path / ".serving").touch()
    assert not installed("serve", tmp_path)
    assert installed("check", tmp_path)[-1] == ".[test]"
    (tmp_path / ".serving").unlink()
    (tmp_path / ".ready").touch()
    assert not installed("serve", tmp_path)
    assert not installed("check", tmp_path)


def test_bytecode_is_kept_where_the_shell_says_not_to(tmp_path: Path) -> None:
    """Nothing is compiled at installation, so each process would compile all that it imports."""
    (tmp_path / ".serving").touch()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").write_text("#!/bin/sh\nenv\n")
    (tmp_path / "bin/python").chmod(0o755)
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1", "ELSE": "1"}
    arguments = ["make", "serve", "--no-print-directory", f"VENV={tmp_path}"]
    done = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert "ELSE=1" in done.stdout.splitlines()
    assert "PYTHONDONTWRITEBYTECODE" not in done.stdout
