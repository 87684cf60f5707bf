"""Builds the C++ sources with the machine's own compiler, once per user. Knows no tensor and no kernel.

A library's name is a digest of the sources, the compiler and the CPU: another machine that shares the cache,
a new compiler or a changed source each get a file of their own. A library that another user may have made or
changed is not loaded: it is replaced or, where the cache itself is not to be trusted, compiled in a directory
that is removed when it has been loaded.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

from runtime.base.cpu_isa import CpuIsa, cpu_isa, machine_isa, usable_isas
from runtime.base.ownership import fault_of
from runtime.base.progress import LINE_S, Progress

logger = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).parent / "src"
COMPILERS = ("g++", "c++", "clang++")
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-pthread",
    "-ffp-contract=fast",  # to fused multiply-add, as GNU C++ does by default and ISO C++ does not
    "-fno-math-errno",
    # The loader merges static variables of visible templates over all libraries of a process, and those of
    # libraries for different CPUs differ in size.
    "-fvisibility=hidden",
)
_AMX = ("amx-tile", "amx-bf16", "amx-int8")
_ABOVE: dict[CpuIsa, tuple[str, ...]] = {"avx512": ("avx512bf16", *_AMX), "avx512_bf16": _AMX}
"""Instruction sets beyond a level that -march=native may enable and the sources use."""
PARTS: Mapping[str, tuple[str, ...]] = MappingProxyType({"adapters": ("lent_team.cpp", "lora.cpp")})
"""Libraries that only some launches need, by their sources. The library without a name has all others."""
COMPILE_TIMEOUT_S = 300.0
UNFINISHED = "building-"
"""Beginning of the name of a folder in the cache in which a library is compiled."""
ABANDONED_S = 4 * COMPILE_TIMEOUT_S
"""Age after which such a folder is one whose process was killed."""
UNUSED_S = 30 * 24 * 3600.0
"""Age of a library's last use after which the next one that is compiled takes its place."""
MAX_UNITS = 4  # more save nothing: attention takes as long as all other sources
INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)
STRUCTURE = re.compile(r"^struct (\w+) \{$", re.MULTILINE)
NO_CHECKS: Mapping[str, str] = MappingProxyType({})


class BuildError(Exception):
    """The kernels cannot be built here. The message gives the reason in one line for users."""


def build_library(
    cache_dir: Path,
    isa: CpuIsa | None = None,
    source_dir: Path | None = None,
    defines: Sequence[str] = (),
    checks: Mapping[str, str] = NO_CHECKS,
    part: str = "",
) -> Path:
    """Return the shared library for this CPU, compiling it if the cache does not have it. Several processes
    may call this at a time.

    - cache_dir: a `trusted_cache`, if the library is to be loaded. isa: largest instruction set to use; None:
      the largest that may be used.
    - source_dir: sources of another version; None: this one's. defines: macros as NAME=VALUE.
    - checks: C++ code by structure name, compiled after the structure's definition. part: one of PARTS, a
      library of its own; empty: the main library.

    Raises BuildError without a compiler, if compiling fails, or if the cache cannot be written.
    """
    compiler = _find_compiler()
    source_dir = source_dir or SOURCE_DIR
    flags = (*FLAGS, *_arch_flags(isa), *(f"-D{each}" for each in defines))
    name = f"{part}-" * bool(part) + _digest(compiler, flags, source_dir, checks)
    library = cache_dir / f"kernels-{name}.so"
    if _is_there(library):
        fault = fault_of(library)
        if fault is None:
            return library
        logger.warning("a compiled kernel library is not used: %s", fault)
    of = f" of {part}" * bool(part)
    logger.info("compiling CPU kernels%s with %s, once for this machine, to %s", of, compiler, library)
    began = time.monotonic()
    try:
        _compile(compiler, flags, source_dir, library, checks, part)
    except OSError as error:
        raise BuildError(f"the kernel cache {cache_dir} cannot be written: {error}") from error
    logger.info("compiled CPU kernels%s in %.1f s", of, time.monotonic() - began)
    return library


@contextmanager
def trusted_cache(cache_dir: Path) -> Iterator[Path]:
    """Context manager for the cache directory, created if necessary. If it cannot be created, or other users
    could put libraries there, it is a private directory instead, removed at the end. Raises BuildError.
    """
    try:
        cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        fault = fault_of(cache_dir)
    except OSError as error:
        fault = f"{cache_dir} cannot be made: {error.strerror}"
    if fault is None:
        yield cache_dir
        return
    logger.warning("the kernel cache is not used, so CPU kernels are compiled at each start: %s", fault)
    try:
        private = tempfile.TemporaryDirectory(prefix="carousel-kernels-")
    except OSError as error:
        raise BuildError(f"there is no directory for compiled kernels: {fault}; {error}") from error
    with private as folder:
        yield Path(folder)


def _find_compiler() -> str:
    for name in COMPILERS:
        if (path := shutil.which(name)) is not None:
            return path
    raise BuildError(f"there is no C++ compiler (looked for {', '.join(COMPILERS)})")


def _arch_flags(isa: CpuIsa | None) -> tuple[str, ...]:
    assert isa is None or isa in usable_isas(), f"{isa} may not be used here"
    isa = isa or cpu_isa()
    if isa == machine_isa():
        return ("-march=native",)
    if isa == "portable":
        return ()
    if isa == "avx2":
        return ("-march=x86-64-v3",)
    return ("-march=native", *(f"-mno-{name}" for name in _ABOVE[isa]))


def _digest(compiler: str, flags: tuple[str, ...], source_dir: Path, checks: Mapping[str, str]) -> str:
    digest = hashlib.sha256()
    for source in sorted(source_dir.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    version = _run([compiler, "--version"]).stdout
    digest.update("\0".join((*flags, version, *cpu_description(), *checks.values())).encode())
    return digest.hexdigest()[:32]


def cpu_description() -> list[str]:
    """Return model and features of the first core, on which the compiler's -march=native depends."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return [platform.machine(), platform.processor()]
    names = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU part")
    return [platform.machine(), *(line for line in lines if line.split("\t")[0].strip() in names)]


def _compile(
    compiler: str,
    flags: tuple[str, ...],
    source_dir: Path,
    library: Path,
    checks: Mapping[str, str],
    part: str,
) -> None:
    """Write the library in a temporary folder and then move it, so that no process sees an incomplete one."""
    library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    num_cores = len(os.sched_getaffinity(0))
    # Sources of another version may have the same names.
    together = min(num_cores, MAX_UNITS) if source_dir == SOURCE_DIR else None
    unchecked = set(checks)
    _remove_abandoned(library.parent)
    _remove_unused(library.parent)
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=UNFINISHED) as folder:
        objects, commands = [], []
        for number, sources in enumerate(_units(source_dir, together, part)):
            defined = checks.keys() & _structures(sources)
            unchecked -= defined
            unit = sources[0]
            if len(sources) > 1 or defined:
                unit = Path(folder, f"{number}.cpp")
                lines = [f'#include "{source}"\n' for source in sources]
                unit.write_text("".join([*lines, *(checks[name] for name in sorted(defined))]))
            objects.append(f"{folder}/{number}.o")
            commands.append([compiler, *flags, "-c", str(unit), "-o", objects[-1]])
        if unchecked:
            raise BuildError(f"the sources have no structure {', '.join(sorted(unchecked))}")
        with ThreadPoolExecutor(num_cores) as pool:
            _wait([pool.submit(_run_compiler, command) for command in commands])
        unfinished = Path(folder, library.name)
        _run_compiler([compiler, *flags, "-shared", *objects, "-o", str(unfinished)])
        unfinished.chmod(0o600)
        unfinished.replace(library)


def _remove_abandoned(cache_dir: Path) -> None:
    for folder in cache_dir.glob(f"{UNFINISHED}*"):
        with suppress(OSError):  # another process has removed it
            if time.time() - folder.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(folder)


def _is_there(library: Path) -> bool:
    """Return True if the cache has a library. Records its use, so that it is not removed before it is
    loaded.
    """
    with _locked(library.parent, fcntl.LOCK_SH):
        is_there = library.is_file()
        if is_there:
            with suppress(OSError):  # a cache that this user may only read
                os.utime(library)
        return is_there


def _remove_unused(cache_dir: Path) -> None:
    """Remove libraries that no launch has used for weeks: mostly those of earlier versions. A process that
    has loaded one keeps it.
    """
    with _locked(cache_dir, fcntl.LOCK_EX | fcntl.LOCK_NB) as is_locked:
        for library in cache_dir.glob("kernels-*.so") if is_locked else ():
            with suppress(OSError):
                found = library.lstat()
                # Earlier versions note no use, but most file systems note that a file was read.
                if time.time() - max(found.st_mtime, found.st_atime) > UNUSED_S:
                    library.unlink()
                    logger.info("removed %s, which was not used for 30 days", library)


@contextmanager
def _locked(cache_dir: Path, operation: int) -> Iterator[bool]:
    """Context manager for the lock of the cache: True if it is held, False if another process has it or there
    can be none.
    """
    fd = -1
    try:
        fd = os.open(cache_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(fd, operation)
        is_locked = True
    except OSError:
        is_locked = False
    try:
        yield is_locked
    finally:
        if fd >= 0:
            os.close(fd)


def _wait(jobs: Sequence[Future[None]]) -> None:
    """Wait for all jobs and show the progress. Raises the exception of one that fails."""
    progress, unfinished = Progress("compiling CPU kernels", "parts", say=logger.info), set(jobs)
    while unfinished:
        progress.note(len(jobs) - len(unfinished), len(jobs))
        _, unfinished = wait(unfinished, LINE_S, FIRST_COMPLETED)
    progress.note(len(jobs), len(jobs))
    for job in jobs:
        job.result()


def _units(source_dir: Path, number: int | None, part: str = "") -> list[list[Path]]:
    """Divide the sources into `number` groups of about equal work, the largest first; None: each source is a
    group. A group is compiled as one translation unit, because half the time of most sources went into
    reading the same headers.
    """
    read = {path: _with_headers(path) for path in _sources(source_dir, part)}
    units: list[list[Path]] = [[] for _ in range(number or len(read))]

    def work(sources: list[Path]) -> int:
        return sum(path.stat().st_size for path in set().union(*(read[each] for each in sources)))

    for path in sorted(read, key=lambda path: (-work([path]), path.name)):
        min(units, key=work).append(path)
    return [unit for unit in units if unit]


def _sources(source_dir: Path, part: str) -> list[Path]:
    if part:
        return [source_dir / name for name in PARTS[part]]
    of_parts = {name for names in PARTS.values() for name in names}
    return [path for path in source_dir.glob("*.cpp") if path.name not in of_parts]


def _with_headers(path: Path) -> set[Path]:
    """Return a source and the headers beside it that it includes."""
    found, unread = set[Path](), [path]
    while unread:
        found.add(each := unread.pop())
        included = {path.parent / name for name in INCLUDE.findall(each.read_text())}
        unread += [header for header in included - found if header.is_file()]
    return found


def _structures(sources: list[Path]) -> set[str]:
    """Return the names of the structures that a unit defines."""
    read = set().union(*map(_with_headers, sources))
    return {name for path in read for name in STRUCTURE.findall(path.read_text())}


def _run_compiler(command: list[str]) -> None:
    result = _run(command)
    if result.returncode != 0:
        raise BuildError(f"{command[0]} failed: {result.stderr.strip()[-2000:]}")


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error
