"""Imports on a machine with a GPU and no network: those of its image and the wheels that are sent."""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.harness.sources import ROOT, source_of

GPU = ROOT / "benchmarks" / "gpu"
RUN_THERE = (
    *("launch.py", "runtime", "tokenizer_proc", "scheduler_proc", "detokenizer_proc"),
    *("carousel", "model_worker", "bench_serving", "benchmarks/gpu", "tests/conftest.py"),
    "tests/gpu",
)
PLUGINS = {"pytest-timeout", "pytest-xdist"}  # `timeout` in pyproject.toml; `-n` in steps.py
OPTIONAL = {
    "flashinfer": "--attention-backend flashinfer is refused without it, and its test skipped",
    "opentelemetry": "no traces are sent without it, and --otlp-traces-endpoint is refused",
    "cudnn": "a way to attend that is measured where it is installed",
    "flash_attn": "the same",
}
PYTHON = {"python_version": "3.12", "python_full_version": "3.12.3"}


def listed(name: str) -> set[str]:
    """Distributions named in a file of benchmarks/gpu, without their versions."""
    lines = (GPU / name).read_text().splitlines()
    return {str(canonicalize_name(line.partition("==")[0])) for line in lines if not line.startswith("#")}


def files() -> list[Path]:
    """The project's files that are run there, and those that they import."""
    tops = [ROOT / name for name in RUN_THERE]
    waiting = [path for top in tops for path in ([top] if top.is_file() else sorted(top.rglob("*.py")))]
    found: dict[Path, None] = {}
    while waiting:
        path = waiting.pop()
        if path not in found:
            found[path] = None
            waiting += [each for name in source_of(path).imports for each in files_of(name)]
    return list(found)


def files_of(module: str) -> list[Path]:
    """A module's file, if it is the project's, and its packages' files."""
    parts = module.split(".")
    folders = [ROOT.joinpath(*parts[:n]) for n in range(1, len(parts) + 1)]
    candidates = [ROOT.joinpath(*parts).with_suffix(".py"), *(folder / "__init__.py" for folder in folders)]
    return [path for path in candidates if path.exists()]


def imported_modules() -> dict[str, str]:
    """Top-level modules of others, also those imported on demand; the first file that names each."""
    found: dict[str, str] = {}
    for path in files():
        for name in source_of(path).imports:
            top = name.partition(".")[0]
            if top not in sys.stdlib_module_names and not files_of(name):
                found.setdefault(top, str(path.relative_to(ROOT)))
    return found


def test_all_that_is_imported_is_in_the_image_or_in_the_wheels() -> None:
    there = listed("image_packages.txt") | listed("wheels.txt")
    modules = imported_modules()
    assert {"torch", "zmq", "pytest", "transformers", "httpx"} <= modules.keys()
    of_module = metadata.packages_distributions()
    missing = {}
    for module, path in modules.items():
        names = {str(canonicalize_name(name)) for name in of_module.get(module, [module])}
        if module not in OPTIONAL and not names & there:
            missing[module] = path
    assert not missing, "neither in image_packages.txt nor in wheels.txt"
    assert there >= PLUGINS


def test_the_wheels_are_installed_without_what_they_require_because_it_is_there() -> None:
    there = listed("image_packages.txt") | listed("wheels.txt")
    missing = {}
    for wheel in listed("wheels.txt"):
        for text in metadata.requires(wheel) or ():
            requirement = Requirement(text)
            applies = requirement.marker is None or requirement.marker.evaluate({**PYTHON, "extra": ""})
            if applies and canonicalize_name(requirement.name) not in there:
                missing[requirement.name] = wheel
    assert not missing


def test_the_wheels_are_pinned_and_not_of_the_image() -> None:
    lines = (GPU / "wheels.txt").read_text().splitlines()
    assert all(re.fullmatch(r"[a-z]+==[0-9.]+", line) for line in lines)
    assert not listed("wheels.txt") & listed("image_packages.txt")
