"""Facts about the project's own source. Each file is parsed once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = {".venv", "build", "dist"}


@dataclass(slots=True, frozen=True)
class Source:
    num_lines: int
    functions: tuple[tuple[str, int, int], ...]
    """Name, first line and number of lines of each function, inner ones included."""
    imports: tuple[str, ...]
    """Dotted names of the modules of all imports that run: not those under `if TYPE_CHECKING`."""
    names: tuple[str, ...]
    """Dotted names of all that is imported, for types alone, too; of `from a import b` it is a.b."""


@cache
def source_of(path: Path) -> Source:
    """Raises AssertionError for a relative import."""
    text = path.read_text()
    functions: list[tuple[str, int, int]] = []
    imports: list[str] = []
    names: list[str] = []
    for node, runs in statements(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            functions.append((node.name, node.lineno, node.end_lineno - node.lineno + 1))
        elif isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
            if runs:
                imports += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names += (f"{node.module}.{alias.name}" for alias in node.names)
            if runs:
                imports.append(node.module or "")
    return Source(len(text.splitlines()), tuple(functions), tuple(imports), tuple(names))


def statements(node: ast.AST, runs: bool = True) -> Iterator[tuple[ast.AST, bool]]:
    """All below a node, each with whether it is ever run."""
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        for part in getattr(node, field, ()):
            yield part, runs
            is_typing = isinstance(part, ast.If) and ast.unparse(part.test) == "TYPE_CHECKING"
            yield from statements(part, runs and not is_typing)


def sources() -> list[Path]:
    """Return every file of Python in the project."""
    tops = [path for path in ROOT.iterdir() if path.name not in SKIPPED]  # a .venv takes a second to walk
    return sorted([*ROOT.glob("*.py"), *(path for top in tops for path in top.rglob("*.py"))])
