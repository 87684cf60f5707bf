"""Size limits: a file or a function that outgrows them hides a second owner."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.harness.sources import ROOT, source_of, sources

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 90
OWN_LIMITS = {
    "scheduler_proc/scheduler.py": 300,
    "carousel/__init__.py": 140,
}


def too_large(path: Path) -> Iterator[str]:
    """Return what is too large in a file, in words."""
    name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
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


def test_what_is_too_large_is_found(tmp_path: Path) -> None:
    fitting = tmp_path / "fitting.py"
    fitting.write_text("x = 1\n" * MAX_FILE_LINES)
    assert not list(too_large(fitting))
    file = tmp_path / "large.py"
    body = "    x = 1\n" * (MAX_FUNCTION_LINES - 1)
    file.write_text(f"def fits():\n{body}\n\ndef long():\n{body}    x = 2\n" + "x = 1\n" * MAX_FILE_LINES)
    found = list(too_large(file))
    assert found == [
        f"large.py has {MAX_FILE_LINES + 2 * MAX_FUNCTION_LINES + 3} lines",
        f"large.py:{MAX_FUNCTION_LINES + 3} long has {MAX_FUNCTION_LINES + 1} lines",
    ]
