"""The wheel and its commands, in a folder of somebody's own files with the names of ours."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from carousel import Client, SamplingParams
from tests.harness.ring.launched import ROOT, START_S, wait_until

BUILD = """
import sys
from setuptools import build_meta
folder = sys.argv[1]  # building changes the arguments
build_meta.build_sdist(folder)
build_meta.build_wheel(folder)
"""
PACKAGES = {
    *("bench_serving", "carousel", "detokenizer_proc", "model_worker", "runtime", "scheduler_proc"),
    "tokenizer_proc",
}
POLICY = """
class Policy:
    def order(self, waiting):
        return range(len(waiting))
"""
DEMO = """
from carousel import LLM, SamplingParams

if __name__ == "__main__":
    with LLM(skip_tokenizer_init=True) as model:
        print(len(model.generate([5, 6], SamplingParams(max_tokens=3, ignore_eos=True)).token_ids))
"""
MODEL_FILES = {f"carousel/demo_model/{name}" for name in os.listdir(ROOT / "demo/model")}
PAGE = ROOT / "carousel/server/web/static"
PAGE_FILES = {path.relative_to(ROOT).as_posix() for path in PAGE.rglob("*") if path.is_file()}
SOURCES = (*PACKAGES, "demo", "pyproject.toml", "MANIFEST.in", "README.md", "launch.py")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source / name)
    subprocess.run([sys.executable, "-c", BUILD, str(folder)], cwd=source, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel installs; commands are in its `bin`."""
    (wheel,), folder = built.glob("*.whl"), tmp_path_factory.mktemp("installed")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target")
    subprocess.run([*pip, str(folder), str(wheel)], check=True)
    return folder


@pytest.fixture
def run(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command in a folder of the user's own, with the project as it was installed."""
    monkeypatch.setenv("PYTHONPATH", str(installed))
    for name in ("client", "text", "launch", "mine"):
        (tmp_path / f"{name}.py").write_text(POLICY if name == "mine" else "raise SystemExit('not ours')\n")
    for name in ("runtime", "scheduler_proc"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('not ours')\n")
    monkeypatch.chdir(tmp_path)

    def run_here(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    return run_here


def test_the_wheel_holds_our_packages_and_the_demo_model_alone(built: Path) -> None:
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == PACKAGES
    assert names >= MODEL_FILES
    assert "model_worker/kernels/native/src/logits.cpp" in names
    assert names >= PAGE_FILES
    with tarfile.open(sdist) as archive:
        inside = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert inside >= {*MODEL_FILES, *PAGE_FILES, "launch.py", "carousel/__init__.py"}


@pytest.mark.parametrize("command", ["carousel", "carousel-batch", "carousel-bench", "carousel-keys"])
def test_a_command_takes_nothing_of_the_users_for_ours(
    installed: Path, run: Callable[..., subprocess.CompletedProcess[str]], command: str
) -> None:
    done = run(str(installed / "bin" / command), "--help")
    assert (done.returncode, "not ours" in done.stderr) == (0, False), done.stderr
    assert done.stdout.startswith("usage: ")


def test_a_launch_finds_the_users_policy_and_nothing_else_of_theirs(
    installed: Path, run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    assert run(sys.executable, str(ROOT / "launch.py"), "--help").returncode == 0
    run_dir = tmp_path / "ring"
    command = [
        str(installed / "bin" / "carousel"),
        "--no-http",
        "--skip-tokenizer-init",
        f"--run-dir={run_dir}",
    ]
    launch = subprocess.Popen([*command, "--schedule-policy", "mine:Policy"], stderr=subprocess.PIPE)
    try:
        wait_until(
            lambda: launch.poll() is not None or (run_dir / "state.json").exists(), START_S, "it is up"
        )
        with Client(run_dir, connect_timeout=START_S) as client:
            greedy = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
            assert len(client.generate([5, 6], greedy, timeout=START_S).token_ids) == 4
            assert client.server_info(timeout=START_S)["schedule_policy"] == "mine:Policy"
    finally:
        launch.send_signal(signal.SIGINT)
        _, errors = launch.communicate(timeout=START_S)
    assert launch.returncode == 0, errors


def test_a_script_that_is_shadowed_is_told_by_what(
    run: Callable[..., subprocess.CompletedProcess[str]], installed: Path, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text("from carousel import Client\n")
    (tmp_path / "runtime/__init__.py").write_text("")
    done = run(sys.executable, "script.py")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: ")
    for path in (installed / "runtime", tmp_path / "runtime/__init__.py"):
        assert str(path) in last
    shutil.rmtree(tmp_path / "runtime")
    (tmp_path / "script.py").write_text(DEMO)
    done = run(sys.executable, "script.py")
    assert done.stdout == "3\n", done.stderr
