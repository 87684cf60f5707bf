"""The build of the C++ kernels: cached, atomic, and a clear refusal where it cannot be done."""

from __future__ import annotations

import shutil
import stat
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from model_worker.kernels.native import build
from model_worker.kernels.native.build import BuildError, build_library
from tests.cpu.native import needs_compiler


@pytest.fixture
def small_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    monkeypatch.setattr(build, "SOURCE_DIR", folder)
    return folder


@needs_compiler
def test_a_library_is_compiled_once_and_found_again(
    small_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build_library(tmp_path / "cache")
    assert stat.S_IMODE(first.stat().st_mode) == 0o600
    assert stat.S_IMODE(first.parent.stat().st_mode) == 0o700

    def refuse(*_: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(build, "_compile", refuse)
    assert build_library(tmp_path / "cache") == first


@needs_compiler
def test_sources_target_and_cpu_each_have_a_library_of_their_own(
    small_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [build_library(tmp_path), build_library(tmp_path, "portable")]
    monkeypatch.setattr(build, "_cpu", lambda: ["another CPU"])
    paths.append(build_library(tmp_path))
    (small_source / "one.cpp").write_text('extern "C" int one() { return 2; }\n')
    paths.append(build_library(tmp_path))
    assert len(set(paths)) == 4


@needs_compiler
def test_processes_that_build_at_once_leave_one_library_and_no_rest(
    small_source: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(build_library, [cache] * 4))
    assert list(cache.iterdir()) == list(paths)


@needs_compiler
def test_a_failing_compiler_is_named_with_what_it_said_and_leaves_nothing(
    small_source: Path, tmp_path: Path
) -> None:
    (small_source / "one.cpp").write_text("this is no C++\n")
    with pytest.raises(BuildError, match=r"failed: .*one\.cpp"):
        build_library(tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_without_a_compiler_the_error_says_what_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(name: str) -> None:
        assert name in build.COMPILERS

    monkeypatch.setattr(shutil, "which", nothing)
    with pytest.raises(BuildError, match=r"no C\+\+ compiler \(looked for g\+\+, c\+\+, clang\+\+\)"):
        build_library(tmp_path)


def test_a_compiler_that_cannot_be_run_is_an_error_not_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(command: Sequence[str], **_: object) -> None:
        raise FileNotFoundError(command[0])

    monkeypatch.setattr(shutil, "which", lambda name: f"/nowhere/{name}")
    monkeypatch.setattr(subprocess, "run", missing)
    with pytest.raises(BuildError, match="cannot be run"):
        build_library(tmp_path)


@needs_compiler
def test_a_cache_that_cannot_be_written_is_an_error_that_names_it(small_source: Path, tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    with pytest.raises(BuildError, match=str(in_the_way / "cache")):
        build_library(in_the_way / "cache")
