"""Who may import whom. A new edge is a design decision:
change this table in the same commit, with the reason.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.sources import ROOT, source_of

# package or part of one -> what of the project it may import besides itself; a part with a row of its own is
# not meant by the row of its package
FLOORS: dict[str, set[str]] = {
    "runtime": set(),
    "runtime.text": {"runtime"},
    "tokenizer_proc": {"runtime", "runtime.text"},
    "scheduler_proc": {"runtime"},
    "detokenizer_proc": {"runtime", "runtime.text"},
    "model_worker": {"runtime"},
    "carousel.retention": {"runtime"},
    "carousel.client": {"runtime", "carousel.retention"},
    "carousel.trtllm": {"runtime", "carousel.retention", "carousel.client"},
    "carousel": {"runtime", "carousel.retention", "carousel.client", "carousel.trtllm"},
    # text: logprobs show tokens, the wire carries ids
    "carousel.server": {"runtime", "carousel.client", "runtime.text"},
    # text: prompts of a wanted length need the tokenizer
    "bench_serving": {"runtime", "runtime.text", "carousel.client"},
    "launch": {"runtime"},
}

# Inside a package: part -> the parts that stand below it and that it may import.
SCHEDULER_ORDER = [
    {"executor", "limits", "request", "row_columns"},
    {"deadlines", "phases", "solitary", "sorted_requests"},
    {"cache"},
    {"batch"},
    {"results"},
    {"features"},
    {"capacity", "policy"},
    {"prefill_adder"},
    {"output", "queue_times", "static_batch", "step_log", "step_profile"},
    {"lifecycle"},
    {"request_records"},
    {"step_stats"},
    {"stats_questions"},
    {"controls"},
    {"admission", "intake", "llm_request"},
    {"preemption", "request_scheduler"},
    {"chosen_batch"},
    {"batch_builder"},
    {"composition", "scheduler"},
    {"loop"},
    {"main"},
]

TORCH_FREE = [
    "runtime",
    "tokenizer_proc",
    "scheduler_proc",
    "detokenizer_proc",
    "carousel",
    "bench_serving",
]


TORCH_FREE_MODULES = [
    "scheduler_proc.main",
    "tokenizer_proc.main",
    "detokenizer_proc.main",
    "carousel.server.main",
    "bench_serving.main",
    "model_worker.executors.process",  # the scheduler's end of the worker process
]


def modules_of(package: str) -> list[Path]:
    folder = ROOT / package
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [ROOT / f"{package}.py"]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def floor_of(name: str) -> str:
    """Return the row of FLOORS of a module: its longest beginning that has one; empty: there is none."""
    parts = name.split(".")
    rows = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((row for row in rows if row in FLOORS), "")


@pytest.mark.parametrize("package", FLOORS)
def test_package_imports_only_floors_below(package: str) -> None:
    paths = [path for path in modules_of(package.split(".")[0]) if floor_of(module_of(path)) == package]
    assert paths
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in paths
        for name in source_of(path).imports
        if (other := floor_of(name)) and other != package and other not in FLOORS[package]
    ]
    assert not wrong, "\n".join(wrong)


def part_of(name: str) -> str:
    """Return the part of the scheduler that a module belongs to: a folder that is one, else its file."""
    parts = name.split(".")
    return parts[1] if parts[1] in ("cache", "capacity", "features", "policy") else parts[-1]


def test_scheduler_parts_import_only_parts_below() -> None:
    floor = {part: height for height, parts in enumerate(SCHEDULER_ORDER) for part in parts}
    wrong = []
    for path in modules_of("scheduler_proc"):
        part = part_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
        if part == "__init__":
            continue
        for name in source_of(path).imports:
            other = part_of(name) if name.startswith("scheduler_proc.") else part
            if other != part and floor[other] > floor[part]:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_floors_name_every_package() -> None:
    found = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "benchmarks", "demo"}
    assert found == {name.split(".")[0] for name in FLOORS if name != "launch"}


def test_only_the_model_worker_imports_torch() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for package in TORCH_FREE
        for path in modules_of(package)
        for name in source_of(path).imports
        if name.split(".")[0] in {"torch", "triton"}
    ]
    assert not wrong, "\n".join(wrong)


def test_processes_start_without_torch() -> None:
    """Not even indirectly: a library that drags torch in would cost each process seconds and much memory."""
    code = f"""
import importlib, sys
for name in {TORCH_FREE_MODULES!r}:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"{{name}} imports torch")
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
