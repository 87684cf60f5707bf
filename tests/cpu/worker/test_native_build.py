"""The build of the C++ kernels: cached, atomic, and a clear refusal where it cannot be done."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from model_worker.kernels.native import build, library
from model_worker.kernels.native.build import SOURCE_DIR, BuildError, build_library, trusted_cache
from model_worker.kernels.native.calls import ADAPTER_STRUCTURES, STRUCTURES
from model_worker.kernels.native.layouts import layout_check
from model_worker.kernels.native.library import NativeKernels, load_kernels
from model_worker.kernels.native.lora import SortedRows
from model_worker.ops.native_ops import NativeOps
from runtime.base.cpu_isa import CpuIsa, usable_isas
from runtime.base.environment import kernel_cache_dir
from runtime.base.errors import ConfigError
from tests.harness.models.native import needs_compiler
from tests.harness.ring.other_user import give_away


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
def test_what_a_compilation_left_that_was_killed_is_removed_by_a_later_one(
    small_source: Path, tmp_path: Path
) -> None:
    folders = [tmp_path / "cache" / f"building-{name}" for name in ("killed", "running")]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "0.o").touch()
    os.utime(folders[0], (0, 0))
    build_library(tmp_path / "cache")
    assert [folder.exists() for folder in folders] == [False, True]


def make_old(library: Path, days: float) -> None:
    at_s = time.time() - days * 24 * 3600
    os.utime(library, (at_s, at_s))


@needs_compiler
def test_libraries_that_nobody_has_used_for_a_month_go_when_another_is_compiled(
    small_source: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    unused, used, other = (
        build_library(cache, source_dir=small_source, defines=[f"A={n}"]) for n in range(3)
    )
    for each in (unused, used, other):
        make_old(each, 31)
    (cache / "notes.so").touch()
    make_old(cache / "notes.so", 31)
    assert build_library(cache, source_dir=small_source, defines=["A=1"]) == used
    make_old(other, 29)
    assert unused.exists()
    new = build_library(cache, source_dir=small_source, defines=["A=3"])
    assert set(cache.iterdir()) == {used, other, new, cache / "notes.so"}


@needs_compiler
def test_a_library_that_a_launch_has_found_is_not_removed_before_it_is_loaded(
    small_source: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    found = build_library(cache, source_dir=small_source)
    make_old(found, 31)
    fd = os.open(cache, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)  # as a launch between finding it and noting so
    build_library(cache, source_dir=small_source, defines=["A=1"])
    assert found.exists()
    fcntl.flock(fd, fcntl.LOCK_EX)  # as one that is about to remove it
    with ThreadPoolExecutor(1) as pool:
        finding = pool.submit(build_library, cache, source_dir=small_source)
        found.unlink()
        os.close(fd)
        assert finding.result() == found
    assert found.exists()


@needs_compiler
def test_sources_instruction_set_and_cpu_each_have_a_library_of_their_own(
    small_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [build_library(tmp_path, isa) for isa in usable_isas()]
    assert build_library(tmp_path) == paths[-1]
    monkeypatch.setattr(build, "cpu_description", lambda: ["another CPU"])
    paths.append(build_library(tmp_path))
    (small_source / "one.cpp").write_text('extern "C" int one() { return 2; }\n')
    paths.append(build_library(tmp_path))
    assert len(set(paths)) == len(usable_isas()) + 2


@needs_compiler
def test_a_macro_has_a_library_of_its_own(small_source: Path, tmp_path: Path) -> None:
    (small_source / "one.cpp").write_text("int one() { return ONE; }\n")
    first, second = (build_library(tmp_path, defines=[f"ONE={number}"]) for number in (1, 2))
    assert first != second
    with pytest.raises(BuildError, match="ONE"):
        build_library(tmp_path)


@pytest.mark.parametrize("number", [1, 2])
def test_each_source_is_in_one_of_so_many_units_of_about_equal_work(number: int) -> None:
    units = build._units(SOURCE_DIR, number)
    assert sorted(path for unit in units for path in unit) == sorted(build._sources(SOURCE_DIR, ""))
    assert len(units) == number
    assert units[0][0].name == "attention.cpp"  # the longest to compile comes first
    sizes = [
        sum(path.stat().st_size for path in set().union(*map(build._with_headers, unit))) for unit in units
    ]
    assert max(sizes) <= 1.5 * min(sizes)


@needs_compiler
def test_sources_compile_in_any_company(tmp_path: Path) -> None:
    """Which of them are one unit depends on how many cores the machine has and how long they are."""
    (unit,) = build._units(SOURCE_DIR, 1)
    together = tmp_path / "all.cpp"
    together.write_text("".join(f'#include "{source}"\n' for source in unit))
    build._run_compiler([build._find_compiler(), "-std=c++17", "-fsyntax-only", str(together)])


def test_each_source_is_in_one_library_and_those_of_adapters_are_in_none_that_all_need() -> None:
    of_adapters = build._sources(SOURCE_DIR, "adapters")
    assert {path.name for path in of_adapters} == {"lora.cpp", "lent_team.cpp"}
    assert sorted([*build._sources(SOURCE_DIR, ""), *of_adapters]) == sorted(SOURCE_DIR.glob("*.cpp"))
    (unit,) = build._units(SOURCE_DIR, 1, "adapters")
    assert sorted(unit) == sorted(of_adapters)


@needs_compiler
def test_kernels_of_adapters_are_compiled_for_who_has_adapters_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two libraries are those of the user's own cache; so many were asked for as were loaded."""
    asked: list[str] = []

    def note(cache: Path, isa: CpuIsa | None, part: str = "", **options: Any) -> Path:
        asked.append(part)
        return build_library(kernel_cache_dir(), isa, part=part, **options)

    monkeypatch.setattr(library, "build_library", note)
    kernels = load_kernels.__wrapped__(tmp_path / "cache")
    NativeOps(kernels)
    assert asked == [""]
    rows = SortedRows(kernels, max_rows=3, num_slots=2)
    assert asked == ["", "adapters"]
    for row, slot in enumerate((1, -1, 0)):
        rows.set_row(row, slot)
    rows.sort(torch.arange(3), torch.tensor([0, 2, 3, 4]), 4)
    assert [(slot, tokens.tolist()) for slot, tokens in rows.groups()] == [(0, [3]), (1, [0, 1])]
    assert asked == ["", "adapters"]


@needs_compiler
def test_adapters_without_a_compiler_are_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(cache: Path, isa: CpuIsa | None, part: str = "", **options: Any) -> Path:
        if part:
            raise BuildError("there is no C++ compiler")
        return build_library(kernel_cache_dir(), isa, **options)

    monkeypatch.setattr(library, "build_library", refuse)
    kernels = load_kernels.__wrapped__(tmp_path / "cache")
    with pytest.raises(ConfigError, match=r"enable_lora: .*there is no C\+\+ compiler"):
        NativeOps(kernels).row_adapters(4, 2)


def test_sources_of_another_version_are_compiled_each_by_itself(small_source: Path) -> None:
    (small_source / "two.cpp").write_text('#include "two.h"\n#include "missing.h"\n')
    (small_source / "two.h").write_text("// a header\n")
    assert [[path.name for path in unit] for unit in build._units(small_source, None)] == [
        ["two.cpp"],
        ["one.cpp"],
    ]
    assert build._with_headers(small_source / "two.cpp") == {small_source / "two.cpp", small_source / "two.h"}


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


@needs_compiler
@pytest.mark.parametrize("fault", ["belongs to another user", "chmod go-w"])
def test_a_library_that_another_user_may_have_made_is_compiled_again(
    small_source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: str,
) -> None:
    library = build_library(tmp_path / "cache")
    good = library.read_bytes()
    library.write_bytes(b"planted")
    with monkeypatch.context() as planted:
        if "chmod" in fault:
            library.chmod(0o622)
        else:
            give_away(planted, library)
        assert build_library(tmp_path / "cache") == library
    assert library.read_bytes() == good
    assert stat.S_IMODE(library.stat().st_mode) == 0o600
    assert f"{library} " in caplog.text
    assert fault in caplog.text
    assert list(library.parent.iterdir()) == [library]


@pytest.mark.parametrize("fault", ["belongs to another user", "chmod go-w"])
def test_a_cache_that_another_user_may_change_is_replaced_by_a_private_one_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    cache = tmp_path / "cache"
    with trusted_cache(cache) as used:
        assert used == cache
        assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert cache.is_dir()
    assert not caplog.text
    if "chmod" in fault:
        cache.chmod(0o720)
    else:
        give_away(monkeypatch, cache)
    with trusted_cache(cache) as used:
        assert used != cache
        assert stat.S_IMODE(used.stat().st_mode) == 0o700
        (used / "library.so").touch()
    assert not used.exists()
    assert f"{cache} " in caplog.text
    assert fault in caplog.text


def test_a_cache_to_which_another_users_link_leads_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It could lead elsewhere once its libraries have been checked, where the kernel lets it (the setting
    `fs.protected_symlinks`).
    """
    own, link = tmp_path / "own", tmp_path / "link"
    own.mkdir(mode=0o700)
    link.symlink_to(own)
    with trusted_cache(link) as used:
        assert used == link, "this user's own link is not one of another user"
    give_away(monkeypatch, link, link_alone=True)
    with trusted_cache(link) as used:
        assert used != link
    assert f"{link} is a link of another user" in caplog.text


def test_a_cache_that_cannot_be_made_is_replaced_by_a_private_one_for_a_while(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The home directory may be on a read-only file system, or be /dev/null."""
    (tmp_path / "home").touch()
    with trusted_cache(tmp_path / "home" / ".cache") as used:
        assert stat.S_IMODE(used.stat().st_mode) == 0o700
        (used / "library.so").touch()
    assert not used.exists()
    assert "compiled at each start" in caplog.text
    assert f"{tmp_path}/home/.cache cannot be made: Not a directory" in caplog.text


@needs_compiler
def test_kernels_do_not_come_from_a_cache_that_others_may_change(tmp_path: Path) -> None:
    """The real ones; compiling them takes a while, so what a private directory gets is the user's own."""
    cache = tmp_path / "cache"
    cache.mkdir()
    checks = {
        name: layout_check(name, structure)
        for name, structure in STRUCTURES.items()
        if name not in ADAPTER_STRUCTURES
    }
    with trusted_cache(kernel_cache_dir()) as own:
        good = build_library(own, checks=checks)
        (cache / good.name).write_bytes(b"planted")
        (cache / good.name).chmod(0o600)
    cache.chmod(0o777)
    used: list[Path] = []

    def build_fast(
        folder: Path, isa: CpuIsa | None, defines: Sequence[str], checks: Mapping[str, str]
    ) -> Path:
        used.append(folder)
        return Path(shutil.copy(good, folder))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("model_worker.kernels.native.library.build_library", build_fast)
        kernels = load_kernels.__wrapped__(cache)
    assert isinstance(kernels, NativeKernels)
    assert used[0] != cache
    assert not used[0].exists()


# -- structures that ctypes and C++ both describe ------------------------------------------------------------

SAME = "const void* x; int64_t stride; int32_t rows; float scale; int32_t last;"


class Call(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("rows", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("last", ctypes.c_int32),
    )


def build_call(folder: Path, fields: str, name: str = "Call") -> Path:
    (folder / "src").mkdir()
    (folder / "src/call.h").write_text(
        f"#include <cstdint>\nnamespace carousel {{\nstruct {name} {{\n  {fields}\n}};\n}}\n"
    )
    (folder / "src/one.cpp").write_text('#include "call.h"\n')
    return build_library(folder / "cache", None, folder / "src", checks={"Call": layout_check("Call", Call)})


@needs_compiler
def test_the_same_structure_is_compiled(tmp_path: Path) -> None:
    assert build_call(tmp_path, SAME).is_file()


@needs_compiler
@pytest.mark.parametrize(
    "fields",
    [
        SAME.replace("int32_t rows;", "int64_t rows;"),
        SAME.replace("int32_t rows; float scale;", "float scale; int32_t rows;"),
        SAME.replace("float scale; int32_t last;", "int32_t scale; int32_t last;"),
        SAME.replace("const void* x;", "int64_t x;"),
        SAME.replace("int32_t last;", "int32_t final;"),
        f"{SAME} int32_t more;",  # where ctypes has padding: size and offsets are the same
        SAME.replace("int32_t last;", ""),
    ],
)
def test_a_structure_that_differs_is_not_compiled(tmp_path: Path, fields: str) -> None:
    assert fields != SAME
    with pytest.raises(BuildError, match="Call"):
        build_call(tmp_path, fields)
    assert not list((tmp_path / "cache").glob("*.so"))


@needs_compiler
def test_a_structure_that_no_source_defines_is_named(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="the sources have no structure Call"):
        build_call(tmp_path, SAME, name="Called")


@needs_compiler
def test_a_library_that_was_compiled_for_other_structures_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is compiled where the library is there, so what it was compiled for is in its name."""
    made: list[Path] = []

    def note(*args: object) -> None:
        made.extend(each for each in args if isinstance(each, Path) and each.suffix == ".so")

    monkeypatch.setattr("model_worker.kernels.native.build._compile", note)
    for check in ("", "// one", "// two"):
        build_library(tmp_path, checks={"Call": check})
    assert len(set(made)) == 3


def test_every_structure_of_a_call_is_compared() -> None:
    ours = {each for each in ctypes.Structure.__subclasses__() if each.__module__.startswith("model_worker.")}
    assert len(ours) > 20
    assert ours == set(STRUCTURES.values())
    sources = "".join(path.read_text() for path in SOURCE_DIR.iterdir())
    assert not [name for name in STRUCTURES if f"struct {name} {{" not in sources]


@needs_compiler
def test_kernels_are_compiled_with_all_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, str] = {}

    def note(cache: Path, isa: CpuIsa | None, checks: dict[str, str], **options: Any) -> Path:
        assert not given.keys() & checks.keys()
        given.update(checks)
        return build_library(kernel_cache_dir(), isa, checks=checks, **options)

    monkeypatch.setattr(library, "build_library", note)
    kernels = library.load_kernels.__wrapped__(tmp_path / "cache")
    assert kernels.adapters
    assert given.keys() == STRUCTURES.keys()
