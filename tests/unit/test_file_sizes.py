"""Size limits: a file or a function that outgrows them hides a second owner."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
OWN_LIMITS = {"scheduler_proc/scheduler.py": 300, "carousel/__init__.py": 60}
SKIPPED = {".venv", "build", "dist"}


def sources() -> list[Path]:
    return sorted(p for p in ROOT.rglob("*.py") if not SKIPPED & set(p.relative_to(ROOT).parts))


def too_large(path: Path) -> Iterator[str]:
    """What is too large in a file, in words."""
    text = path.read_text()
    name = str(path.relative_to(ROOT))
    lines = len(text.splitlines())
    if lines > OWN_LIMITS.get(name, MAX_FILE_LINES):
        yield f"{name} has {lines} lines"
    if lines <= MAX_FUNCTION_LINES:
        return
    for node in functions(ast.parse(text)):
        assert node.end_lineno is not None
        length = node.end_lineno - node.lineno + 1
        if length > MAX_FUNCTION_LINES:
            yield f"{name}:{node.lineno} {node.name} has {length} lines"


def functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All below a node; in expressions there are none."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        if not isinstance(child, ast.expr):
            yield from functions(child)


def test_files_and_functions_are_small() -> None:
    found = sources()
    assert len(found) > 100
    assert not [words for path in found for words in too_large(path)]
