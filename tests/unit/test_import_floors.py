"""Who may import whom. A new edge is a design decision:
change this table in the same commit, with the reason.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.sources import ROOT, source_of

# package -> project packages it may import besides itself
FLOORS: dict[str, set[str]] = {
    "runtime": set(),
    "text": {"runtime"},
    "tokenizer_proc": {"runtime", "text"},
    "scheduler_proc": {"runtime"},
    "detokenizer_proc": {"runtime", "text"},
    "model_worker": {"runtime"},
    "client": {"runtime"},
    "carousel": {"runtime", "client"},
    "api_server": {"runtime", "client", "text"},  # text: logprobs show tokens, the wire carries ids
    "bench_serving": {"runtime", "text", "client"},  # text: prompts of a wanted length need the tokenizer
    "launch": {"runtime"},
}

# Inside a package: part -> the parts that stand below it and that it may import.
SCHEDULER_ORDER = [
    {"executor", "limits", "request", "rows"},
    {"deadlines", "phases", "solitary", "waiting_queue"},
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
    "text",
    "tokenizer_proc",
    "scheduler_proc",
    "detokenizer_proc",
    "client",
    "carousel",
    "api_server",
    "bench_serving",
]


TORCH_FREE_MODULES = [
    "scheduler_proc.main",
    "tokenizer_proc.main",
    "detokenizer_proc.main",
    "api_server.main",
    "bench_serving.main",
    "model_worker.executors.process",  # the scheduler's end of the worker process
]


def modules_of(package: str) -> list[Path]:
    folder = ROOT / package
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [ROOT / f"{package}.py"]


@pytest.mark.parametrize("package", FLOORS)
def test_package_imports_only_floors_below(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules_of(package)
        for name in source_of(path).imports
        if (top := name.split(".")[0]) in FLOORS and top != package and top not in FLOORS[package]
    ]
    assert not wrong, "\n".join(wrong)


def test_scheduler_parts_import_only_parts_below() -> None:
    floor = {part: height for height, parts in enumerate(SCHEDULER_ORDER) for part in parts}
    wrong = []
    for path in modules_of("scheduler_proc"):
        part = path.relative_to(ROOT / "scheduler_proc").parts[0].removesuffix(".py")
        if part == "__init__":
            continue
        for name in source_of(path).imports:
            other = name.split(".")[1] if name.startswith("scheduler_proc.") else part
            if other != part and floor[other] > floor[part]:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_floors_name_every_package() -> None:
    found = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "benchmarks", "demo"}
    assert found == {name for name in FLOORS if name != "launch"}


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
