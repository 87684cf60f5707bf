"""Packages that make installs: serving gets no test tools, tests and checks get both, nothing comes twice.
Its commands keep bytecode.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.harness.sources import ROOT

VENV = ".venv"


def lines_of_make(project: Path, *arguments: str, **environment: str) -> list[str]:
    """Return what make prints in this folder."""
    done = subprocess.run(
        ["make", "--no-print-directory", f"VENV={VENV}", *arguments],
        cwd=project,
        # A make that runs this test has settings of its own for others below it.
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def commands(target: str, project: Path) -> list[str]:
    """Return the commands that make would run for the target."""
    return lines_of_make(project, "--dry-run", target)


def installed(target: str, project: Path) -> list[str]:
    return [line.split()[-1].strip('"') for line in commands(target, project) if "pip install" in line]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of which nothing is installed, in a folder with a space: which no target may have."""
    project = tmp_path / "a project"
    (project / VENV / "bin").mkdir(parents=True)
    (project / "pyproject.toml").touch()
    (project / "Makefile").symlink_to(ROOT / "Makefile")
    return project


def made(project: Path, name: str) -> None:
    """Mark as installed what was so after the last change of pyproject.toml."""
    (project / VENV / name).touch()


def python_that_says(project: Path, program: str) -> None:
    python = project / VENV / "bin/python"
    python.write_text(f"#!/bin/sh\n{program}\n")
    python.chmod(0o755)


@pytest.mark.parametrize(
    ("target", "wanted"),
    [("serve", "."), ("check", ".[test]"), ("test-unit", ".[test]"), ("bench", ".[test]")],
)
def test_a_target_installs_what_it_needs(target: str, wanted: str, project: Path) -> None:
    torch, package = installed(target, project)
    assert torch.startswith("torch==")
    assert package == wanted
    lines = commands(target, project)
    assert any(line.startswith('echo "Installing into') and "GB" in line for line in lines)
    assert not any("--quiet" in line for line in lines)


def test_nothing_is_installed_a_second_time(project: Path) -> None:
    made(project, ".serving")
    assert not installed("serve", project)
    assert installed("check", project)[-1] == ".[test]"
    (project / VENV / ".serving").unlink()
    made(project, ".ready")
    assert not installed("serve", project)
    assert not installed("check", project)


def test_bytecode_is_kept_where_the_shell_says_not_to(project: Path) -> None:
    """Nothing is compiled at installation, so each process would compile all that it imports."""
    made(project, ".serving")
    python_that_says(project, "env")
    lines = lines_of_make(project, "serve", PYTHONDONTWRITEBYTECODE="1", ELSE="1")
    assert "ELSE=1" in lines
    assert not any(line.startswith("PYTHONDONTWRITEBYTECODE") for line in lines)


def test_what_a_part_prints_is_kept_in_a_folder_whatever_its_name(project: Path) -> None:
    made(project, ".ready")
    python_that_says(project, 'echo "9 passed"')
    folder = project / "things of today"
    folder.mkdir()
    assert lines_of_make(project, "--silent", "test-project", TMPDIR=str(folder)) == ["", "9 passed"]
    assert not list(folder.iterdir())
