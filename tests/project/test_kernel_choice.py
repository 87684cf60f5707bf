"""Kernels are chosen in one place of a folder, when a model is loaded: nothing else asks where it runs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.harness.sources import ROOT, source_of

# Folder -> the modules in it that choose.
FOLDERS: dict[str, set[str]] = {
    "model_worker/layers": set(),
    "model_worker/models": set(),
    # Assert that what is recorded is C++.
    "model_worker/runner": {"recording/forward_program.py", "recording/stage_program.py"},
    "model_worker/sampling": {"ops/selection.py"},
}
# Folder -> the modules in it that know the kernels of one kind of device, each made for that kind.
KNOW_KERNELS: dict[str, set[str]] = {
    "model_worker/layers": set(),
    "model_worker/models": set(),
    "model_worker/runner": {
        *("recording/forward_program.py", "recording/native_inputs.py", "recording/stage_program.py"),
    },
}
ONE_DEVICE = re.compile(r"model_worker\.(kernels\.(native|triton)|ops\.(native|triton)_ops)(\.|$)")
HOLDS_KERNELS = re.compile(r"_?(use_)?native(_|$)|_?kernels$|_?(flashinfer|triton)$")
IS_OF_A_DEVICE = re.compile(r"(.*\.)?_?(torch_)?device\.(type|name)$")
KERNEL_PACKAGES = (
    *("model_worker.attention", "model_worker.device", "model_worker.kernels", "model_worker.ops"),
    "model_worker.sampling.ops",
)


def conditions(tree: ast.AST) -> Iterator[ast.expr]:
    """Everything that is asked: what a branch goes by, and comparisons wherever they are."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            yield node.test
        elif isinstance(node, ast.Compare | ast.BoolOp | ast.UnaryOp):
            yield node
        elif isinstance(node, ast.comprehension):
            yield from node.ifs
        elif isinstance(node, ast.Match):
            yield node.subject
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass", "type"):
            yield node


def imported_from(tree: ast.AST) -> dict[str, str]:
    """The module of each name that is imported."""
    return {
        alias.asname or alias.name: node.module or ""
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def device_choices(text: str) -> list[str]:
    """Everything that a module asks and that only the one which chooses may ask."""
    tree = ast.parse(text)
    modules = imported_from(tree)
    found = [ast.unparse(node) for node in ast.walk(tree) if getattr(node, "attr", "") == "is_cuda"]
    for condition in conditions(tree):
        for node in ast.walk(condition):
            name = ast.unparse(node) if isinstance(node, ast.Attribute | ast.Name) else ""
            if IS_OF_A_DEVICE.match(name) or HOLDS_KERNELS.match(name.rpartition(".")[2]):
                found.append(name)
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
                kinds = [each.id for each in ast.walk(node.args[1]) if isinstance(each, ast.Name)]
                found += (kind for kind in kinds if modules.get(kind, "").startswith(KERNEL_PACKAGES))
    return found


def test_the_worker_asks_for_no_device_and_no_kernels() -> None:
    for name in ("worker", "load_worker"):
        assert not device_choices((ROOT / f"model_worker/{name}.py").read_text())


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_module_asks_for_a_device_or_for_kernels(folder: str) -> None:
    top = ROOT / folder
    paths = {path.relative_to(top).as_posix(): path for path in sorted(top.rglob("*.py"))}
    assert paths.keys() >= FOLDERS[folder]
    wrong = {
        name: asked
        for name, path in paths.items()
        if name not in FOLDERS[folder] and (asked := device_choices(path.read_text()))
    }
    assert not wrong


@pytest.mark.parametrize("folder", KNOW_KERNELS)
def test_no_module_knows_the_kernels_of_one_device(folder: str) -> None:
    top = ROOT / folder
    found = {
        path.relative_to(top).as_posix(): names
        for path in sorted(top.rglob("*.py"))
        if (names := [name for name in source_of(path).names if ONE_DEVICE.match(name)])
    }
    assert found.keys() == KNOW_KERNELS[folder], found


@pytest.mark.parametrize(
    "text",
    [
        "if x.is_cuda: pass",
        "fast = x.is_cuda",
        "y = 1 if logits.device.type != 'cpu' else 2",
        "if self._device.name == 'cuda': pass",
        "match device.type:\n    case 'cuda': pass",
        "if self.native is not None: pass",
        "stays = self._native is not None and not masks",
        "kernels = [x for x in y if x._kernels]",
        "from model_worker.attention.cpu_native import CpuNativeAttention as C\nassert not isinstance(b, C)",
        "from model_worker.sampling.ops.native_ops import N\nwhile isinstance(self.ops, (int, N)): pass",
    ],
)
def test_a_choice_is_seen(text: str) -> None:
    assert device_choices(text)


def test_a_module_that_chooses_is_seen() -> None:
    assert device_choices((ROOT / "model_worker/sampling/ops/selection.py").read_text())
