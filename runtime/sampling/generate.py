"""Write what follows from the table into the files that have it as text: python -m runtime.sampling.generate.

Nothing else stands between the two marker lines; a test fails where it is not what the table says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from runtime.sampling.columns import FLOATS, INTEGERS
from runtime.sampling.table import Column

ROOT = Path(__file__).resolve().parents[2]
MARKER = "Written by python -m runtime.sampling.generate"


class Block(NamedTuple):
    path: str
    lines: Callable[[], Iterable[str]]
    marker: str = ""
    """After which words of the marker, where a file has several."""


def _struct(name: str, columns: Iterable[Column], ctype: str) -> Iterator[str]:
    yield f"struct {name} {{"
    for column in columns:
        yield f"  {ctype} {column.name};" + (f"  // {column.doc}" if column.doc else "")
    yield "};"


def c_structs() -> Iterator[str]:
    yield from _struct("FloatColumns", FLOATS, "float")
    yield ""
    yield from _struct("IntegerColumns", INTEGERS, "int64_t")


def column_views() -> Iterator[str]:
    for column in (*FLOATS, *INTEGERS):
        yield f"    {column.name}: Tensor" + (f"  # {column.doc}" if column.doc else "")


BLOCKS = (
    Block("model_worker/kernels/native/src/sampling_columns.h", c_structs),
    Block("model_worker/sampling/columns.py", column_views),
)


def written(text: str, block: Block) -> str:
    """Return the file's text with the block in its place. Raises ValueError where its markers are missing."""
    begin, end = (f"{MARKER}{block.marker}: {edge}." for edge in ("begin", "end"))
    head, marker, rest = text.partition(begin)
    old, end_marker, tail = rest.partition(end)
    if not marker or not end_marker:
        raise ValueError(f"{block.path} has no lines {begin!r} and {end!r}")
    rest_of_line = old.partition("\n")[0]
    comment = old.rpartition("\n")[2]
    lines = "\n".join(block.lines())
    return f"{head}{begin}{rest_of_line}\n{lines}\n{comment}{end}{tail}"


def main() -> None:
    for block in BLOCKS:
        path = ROOT / block.path
        path.write_text(written(path.read_text(), block))


if __name__ == "__main__":
    main()
