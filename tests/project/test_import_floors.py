"""Imports that are allowed. A new edge is a design decision:
change this table in the same commit, with the reason.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from graphlib import TopologicalSorter
from pathlib import Path

from tests.harness.sources import ROOT, source_of, sources

RUNTIME = {
    *("runtime.base", "runtime.sampling", "runtime.wire", "runtime.settings", "runtime.ring"),
    "runtime.checkpoint",
}
TABLES = {"model_worker/models", "model_worker/kernels/triton"}
"""Folders of modules of one kind, as many as there are."""
LAYERS = {
    *("model_worker.device", "model_worker.kernels", "model_worker.quant", "model_worker.distributed"),
    "model_worker.memory",
}
# Package or folder -> the parts of the project that it may import besides itself. A name stands for all that
# is below it and has no row of its own.
FLOORS: dict[str, set[str]] = {
    "runtime": set(),  # py.typed and the docstring
    "runtime.base": set(),
    "runtime.sampling": {"runtime.base"},
    "runtime.wire": {"runtime.base", "runtime.sampling"},  # packs by its table
    "runtime.settings": {"runtime.base"},
    "runtime.ring": {"runtime.base", "runtime.wire", "runtime.settings"},
    "runtime.checkpoint": {"runtime.base", "runtime.sampling", "runtime.settings"},
    "runtime.text": {"runtime.base", "runtime.wire"},
    "runtime.guides": {"runtime.base"},
    "runtime.launcher": {
        *("runtime.base", "runtime.wire", "runtime.settings", "runtime.ring", "runtime.checkpoint"),
        "runtime.sampling",  # names of additional outputs
    },
    "tokenizer_proc": {*RUNTIME, "runtime.text"},
    "scheduler_proc": {*RUNTIME, "runtime.text"},
    "grammar_proc": {*RUNTIME, "runtime.guides"},
    "detokenizer_proc": {*RUNTIME, "runtime.text"},
    "model_worker": RUNTIME,
    "carousel": {"runtime.base", "runtime.wire", "runtime.guides"},
    "carousel.client": {
        "carousel.client.connection",
        "carousel.client.core",
        "carousel.client.tracing",
        "carousel.conversation",
        "runtime.base",
        "runtime.sampling",
        "runtime.wire",
        "runtime.settings",
        "runtime.ring",
        "runtime.text",  # LLM.get_tokenizer
    },
    "carousel.client.tracing": {"runtime.base", "runtime.wire"},
    "carousel.client.core": {
        "carousel.client.tracing",
        *("carousel.conversation", "carousel.lora", "carousel.prompt_tables", "carousel.retention"),
        "carousel.structured_outputs",
        *("runtime.base", "runtime.sampling", "runtime.wire", "runtime.ring"),
    },
    "carousel.client.connection": {"carousel.client.core", "runtime.base", "runtime.wire", "runtime.ring"},
    "carousel.trtllm": {
        "carousel.lora",
        "carousel.prompt_tables",
        "carousel.retention",
        "carousel.structured_outputs",
        "carousel.client",
        "runtime.base",
        "runtime.sampling",
        "runtime.wire",
        "runtime.ring",
        "runtime.settings",  # other spellings of a setting
        "runtime.checkpoint",  # what reads as a name on the Hub
    },
    # text: logprobs show tokens
    "carousel.server": {
        *("carousel.client", "carousel.conversation", "carousel.lora", "carousel.retention"),
        "carousel.structured_outputs",
        *(*RUNTIME, "runtime.text", "runtime.guides"),
    },
    "carousel.http_client": {"runtime.base"},
    "carousel.batch": {"carousel.client", "carousel.http_client", "runtime.base", "runtime.settings"},
    # text: prompts of a wanted length
    "bench_serving": {"carousel.client", "carousel.http_client", *RUNTIME, "runtime.text"},
    "launch": {"runtime.launcher"},
    # The worker's own, from the device up.
    "model_worker.device": {"runtime.base"},
    "model_worker.kernels": {"runtime.base", "runtime.checkpoint", "runtime.sampling", "runtime.wire"},
    "model_worker.quant": {"model_worker.device", "model_worker.kernels", "runtime.checkpoint"},
    "model_worker.distributed": {
        "model_worker.device",
        "model_worker.kernels",
        "runtime.base",
        "runtime.ring",
    },
    "model_worker.memory": {"model_worker.device", "runtime.wire"},
    "model_worker.layers": {
        *("model_worker.distributed", "model_worker.ops", "model_worker.quant", "runtime.checkpoint"),
    },
    "model_worker.attention": {"model_worker.kernels", "model_worker.memory", "runtime.base"},
    "model_worker.ops": {
        *("model_worker.attention", "model_worker.kernels", "runtime.base", "runtime.checkpoint"),
    },
    "model_worker.sampling": {
        *("model_worker.device", "model_worker.kernels", "model_worker.distributed"),
        *("runtime.base", "runtime.sampling", "runtime.wire"),
    },
    "model_worker.models": {
        *(*LAYERS, "model_worker.layers", "model_worker.attention", "model_worker.ops", "runtime.checkpoint"),
        "runtime.base",  # a spec by its name
        "runtime.sampling",  # names of additional outputs
    },
    "model_worker.loading": {
        *("model_worker.layers", "model_worker.models", "model_worker.ops", *LAYERS),
        *("runtime.base", "runtime.checkpoint", "runtime.settings"),
    },
    "model_worker.adapters": {
        *("model_worker.layers", "model_worker.loading", "model_worker.models", "model_worker.ops", *LAYERS),
        *("runtime.base", "runtime.checkpoint", "runtime.wire"),
    },
    "model_worker.transformers_backend": {
        *("model_worker.attention", "model_worker.loading", "model_worker.ops", *LAYERS),
        *("runtime.base", "runtime.checkpoint"),
    },
    "model_worker.runner": {
        *("model_worker.attention", "model_worker.sampling", "model_worker.models", "model_worker.ops"),
        *LAYERS,
        *("runtime.base", "runtime.checkpoint", "runtime.sampling", "runtime.wire"),
    },
}

# Inside a package: part -> the parts that stand below it and that it may import.
SCHEDULER_ORDER = [
    {"adapter_ids", "chunk_costs", "executor", "limits", "port"}
    | {"row_columns", "samples", "shared_parts", "sorted_requests", "tombstones"},
    {"account", "guesses", "scheduled_row"},
    {"request"},
    {"rows"},
    {"deadlines", "phases", "serving_time", "solitary", "waiting_queue"},
    {"cache", "fair_order", "tenant_accounts", "width_gate"},
    {"waiting_room"},
    {"batch", "tenant_limits"},
    {"micro_batches", "results"},
    {"features"},
    {"capacity", "policy"},
    {"prefill_adder"},
    {"draft_totals", "output", "queue_times", "step_log", "step_profile"},
    {"lifecycle"},
    {"request_records", "sitting_rows", "snapshot", "worker_calls"},
    {"step_stats"},
    {"stats_questions"},
    {"controls", "request_maker"},
    {"admission", "committer", "intake", "llm_request", "mask_gatherer"},
    {"preemption", "request_scheduler"},
    {"chosen_batch"},
    {"batch_builder"},
    {"adapter_capacity", "composition", "feature_factories", "scheduler"},
    {"build_scheduler", "loop"},
    {"heartbeat"},
    {"main"},
]

TORCH_FREE = [
    "runtime",
    "grammar_proc",
    "tokenizer_proc",
    "scheduler_proc",
    "detokenizer_proc",
    "carousel",
    "bench_serving",
]


TORCH_FREE_MODULES = [
    "scheduler_proc.main",
    "tokenizer_proc.main",
    "grammar_proc.main",
    "detokenizer_proc.main",
    "carousel.server.main",
    "bench_serving.main",
    "carousel.batch.main",
    "model_worker.executors.process",  # the scheduler's end of the worker process
]


def modules_of(package: str) -> list[Path]:
    folder = ROOT / package
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [ROOT / f"{package}.py"]


def floor_of(name: str) -> str:
    """Return the row of FLOORS of a name: its longest beginning that has one; empty: there is none."""
    parts = name.split(".")
    rows = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((row for row in rows if row in FLOORS), "")


def test_each_part_imports_only_floors_below() -> None:
    wrong = []
    for package in sorted({row.split(".")[0] for row in FLOORS}):
        for path in modules_of(package):
            own = floor_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
            for name in source_of(path).imports:
                other = floor_of(name)
                is_below = any(f"{name}.".startswith(f"{row}.") for row in FLOORS[own])
                # The processes' own modules, and worker.py, stand above all of their folders.
                is_above = "." not in own and other.startswith(f"{own}.")
                if other and other != own and not is_below and not is_above:
                    wrong.append(f"{path.relative_to(ROOT)} imports {name}")
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
        if path.name == "__init__.py":
            continue
        for name in source_of(path).imports:
            other = part_of(name) if name.startswith("scheduler_proc.") else part
            if other != part and floor[other] > floor[part]:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_floors_name_every_package() -> None:
    found = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "benchmarks", "demo"}
    assert found == {name for name in FLOORS if "." not in name} - {"launch"}
    for package in ("runtime", "model_worker"):
        folders = {f"{package}.{path.parent.name}" for path in (ROOT / package).glob("*/__init__.py")}
        assert folders - FLOORS.keys() <= {"model_worker.executors"}


def test_no_files_import_each_other() -> None:
    """Types count, too: two files that need each other are one."""
    packages = sorted({row.split(".")[0] for row in FLOORS})
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for package in packages
        for path in modules_of(package)
    }
    order = TopologicalSorter[str]()
    for module, path in files.items():
        for name in source_of(path).names:
            # `from package import module` imports the module.
            imported = name if name in files else name.rpartition(".")[0]
            if imported in files and imported != module:
                order.add(module, imported)
    order.prepare()  # raises CycleError, which names a circle


def large_folders(modules: Iterable[str]) -> dict[str, int]:
    """Return the folders of too many modules, named by their paths, each with their number."""
    counts = Counter(
        folder for folder, _, name in (path.rpartition("/") for path in modules) if name != "__init__.py"
    )
    return {
        folder: count
        for folder, count in counts.items()
        if count > (20 if folder.startswith(("tests", "benchmarks")) else 14) and folder not in TABLES
    }


def test_folders_are_small() -> None:
    """A reader takes in what stands in a folder at a glance; tables of models and kernels may be longer."""
    assert not large_folders(str(path.relative_to(ROOT)) for path in sources())


def test_a_large_folder_is_found() -> None:
    def modules(folder: str, count: int) -> list[str]:
        return [f"{folder}/__init__.py", *(f"{folder}/m{i}.py" for i in range(count))]

    small = [*modules("runtime/ring", 14), *modules("tests/unit", 20), *modules("model_worker/models", 30)]
    assert not large_folders(small)
    large = [*modules("runtime/ring", 15), *modules("tests/unit", 21), *modules("runtime/wire", 14)]
    assert large_folders(large) == {"runtime/ring": 15, "tests/unit": 21}


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


def test_the_http_server_run_by_hand_says_who_starts_it_and_imports_no_executor() -> None:
    ended = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "carousel.server"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 64
    imported = {
        line.rpartition("|")[2].strip()
        for line in ended.stderr.splitlines()
        if line.startswith("import time:")
    }
    assert "carousel.server.main" in imported
    assert not {
        name for name in imported if name.split(".")[0] == "torch" or name.startswith("carousel.trtllm")
    }
    assert ended.stderr.splitlines()[-1].endswith("run `carousel`.")


NOT_OF_A_PART = (
    *("tests.harness.simulation.sim_system.System", "tests.harness.scheduler.scheduler_parts.running"),
    *("grammar_proc.open_backend.", "grammar_proc.xgrammar_backend.", "llguidance", "xgrammar"),
    *("transformers", "tests.harness.models.special_tokenizers"),
)
"""Beginnings of names that stand for more than a part alone: the whole scheduler, a grammar library, and
transformers, whose import takes as long as hundreds of tests.
"""


def test_a_unit_test_has_a_part_alone() -> None:
    """Hundreds of turns of the scheduler are seconds: tests/simulation. Guides: tests/cpu/guides. Chat
    templates: tests/cpu/tokenizer.
    """
    files = modules_of("tests/unit")
    assert len(files) > 100
    wrong = [path.name for path in files if any(n.startswith(NOT_OF_A_PART) for n in source_of(path).names)]
    assert not wrong
    assert any(
        n.startswith(NOT_OF_A_PART) for path in modules_of("tests/simulation") for n in source_of(path).names
    )
