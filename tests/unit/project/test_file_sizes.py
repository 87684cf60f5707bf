"""Size limits: a file or a function that outgrows them hides a second owner."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.harness.sources import ROOT, source_of

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
OWN_LIMITS = {
    "scheduler_proc/scheduler.py": 300,
    "carousel/__init__.py": 60,
    # Lists of imports are longer since names of modules are.
    "runtime/wire/messages.py": 401,
    "tests/cpu/trtllm/test_executor_results.py": 406,
}
SKIPPED = {".venv", "build", "dist"}


def sources() -> list[Path]:
    tops = [path for path in ROOT.iterdir() if path.name not in SKIPPED]  # a .venv takes a second to walk
    return sorted([*ROOT.glob("*.py"), *(path for top in tops for path in top.rglob("*.py"))])


def too_large(path: Path) -> Iterator[str]:
    """What is too large in a file, in words."""
    name = str(path.relative_to(ROOT))
    source = source_of(path)
    if source.num_lines > OWN_LIMITS.get(name, MAX_FILE_LINES):
        yield f"{name} has {source.num_lines} lines"
    for function, line, num_lines in source.functions:
        if num_lines > MAX_FUNCTION_LINES:
            yield f"{name}:{line} {function} has {num_lines} lines"


def test_files_and_functions_are_small() -> None:
    found = sources()
    assert len(found) > 100
    assert not [words for path in found for words in too_large(path)]
