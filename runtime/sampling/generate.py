"""Writes the text that follows from the table of sampling parameters into other files: python -m
runtime.sampling.generate. The text stands between two marker lines; a test fails where it differs from the
table.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from runtime.sampling.columns import FLOATS, INTEGERS
from runtime.sampling.kinds import Integer, Kind, Number, Stopping, WordsKind
from runtime.sampling.table import PARAMETERS, Column

LINE_LENGTH = 110
ROOT = Path(__file__).resolve().parents[2]
MARKER = "Written by python -m runtime.sampling.generate"


class Block(NamedTuple):
    path: str
    lines: Callable[[], Iterable[str]]
    marker: str = ""
    """Words behind the marker, for a file with several blocks."""


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


def _typed(indent: str, name: str, kind: str, default: str) -> Iterator[str]:
    """Yield the lines of a field in the formatter's style."""
    line = f"{indent}{name}: {kind} = {default}"
    if len(line) <= LINE_LENGTH:
        yield line
    else:
        yield f"{indent}{name}: {kind} = ("
        yield f"{indent}    {default}"
        yield f"{indent})"


def _docstring(indent: str, doc: str) -> Iterator[str]:
    if len(indent) + len(doc) + 6 <= LINE_LENGTH:
        yield f'{indent}"""{doc}"""'
        return
    yield from textwrap.wrap('"""' + doc, LINE_LENGTH, initial_indent=indent, subsequent_indent=indent)
    yield f'{indent}"""'


def _or_none(kind: str, nullable: bool) -> str:
    return f"{kind} | None" if nullable else kind


def params_fields() -> Iterator[str]:
    for p in PARAMETERS:
        yield from _typed("    ", p.name, _or_none(p.kind.packed, p.nullable), repr(p.neutral))
        yield from _docstring("    ", p.doc)


def params_arguments() -> Iterator[str]:
    for p in PARAMETERS:
        yield f"            {p.name}: {_or_none(p.kind.callers, p.nullable)} = {p.neutral!r},"


def openai_fields() -> Iterator[str]:
    for p in PARAMETERS:
        if "openai" in p.bodies:
            yield from _typed("    ", p.name, f"{p.kind.json} | None", "None")


def sglang_fields() -> Iterator[str]:
    for p in PARAMETERS:
        if "sglang" in p.bodies:
            yield from _typed("    ", p.sglang or p.name, f"{p.kind.json} | None", "None")


def anthropic_fields() -> Iterator[str]:
    for p in PARAMETERS:
        if "anthropic" in p.bodies:
            yield from _typed("    ", p.name, f"{p.kind.json} | None", "None")


def recommended_values() -> Iterator[str]:
    for p in PARAMETERS:
        if p.recommended[0]:
            yield f"    {p.name}: {p.kind.callers} | None = None"


def recommended_keys() -> Iterator[str]:
    for p in PARAMETERS:
        key, kind = p.recommended
        if key:
            yield f"    {key}: {kind} | None = None"


NAMED_DEFAULTS = {"None": "none", "()": "empty", "True": "true", "False": "false"}
GRAMMAR_MASK = "| 5 | grammar mask | | none | Ids that the grammar forbids cannot be drawn. | |"


def docs_table() -> Iterator[str]:
    yield "| step | field | type | default | effect | other names |"
    yield "|---|---|---|---|---|---|"
    ordered = sorted(PARAMETERS, key=lambda p: int(p.step or 99))
    last = ""
    for p in ordered:
        if last == "4" != p.step:
            yield GRAMMAR_MASK
        step, last = "" if p.step == last else p.step, p.step
        names = [f"`{p.sglang}` (SGLang)"] if p.sglang else []
        names += [f"`{name}` (batch manager)" for name in (p.array, *p.aliases) if name not in ("", p.name)]
        default = NAMED_DEFAULTS.get(repr(p.neutral), f"{p.neutral}")
        default = f"{p.neutral:g}" if isinstance(p.neutral, float) else default
        yield f"| {step} | `{p.name}` | {p.kind.described} | {default} | {p.doc} | {', '.join(names)} |"


SHAPES: dict[type[Kind], str] = {
    Integer: "integer [1]",
    Stopping: "integer [1]",
    Number: "float [1]",
    WordsKind: "integer [1, 2, n]",
}


def docs_arrays() -> Iterator[str]:
    yield "| input | other names | type, shape |"
    yield "|---|---|---|"
    for p in PARAMETERS:
        shape = next((text for kind, text in SHAPES.items() if isinstance(p.kind, kind)), "")
        if p.array:
            yield f"| `{p.array}` | {', '.join(f'`{alias}`' for alias in p.aliases)} | {shape} |"


PARAMS, CONFIG = "runtime/wire/sampling_params.py", "runtime/checkpoint/checkpoint_config.py"
BLOCKS = (
    Block("model_worker/kernels/native/src/sampling_columns.h", c_structs),
    Block("model_worker/sampling/columns.py", column_views),
    Block(PARAMS, params_fields, ", fields"),
    Block(PARAMS, params_arguments, ", arguments"),
    Block("carousel/server/openai/types.py", openai_fields),
    Block("carousel/server/sglang/generate_types.py", sglang_fields),
    Block("carousel/server/anthropic/types.py", anthropic_fields),
    Block(CONFIG, recommended_values, ", defaults"),
    Block(CONFIG, recommended_keys, ", file"),
    Block("docs/sampling.md", docs_table),
    Block("docs/batch_manager.md", docs_arrays),
)


def written(text: str, block: Block, lines: Iterable[str] | None = None) -> str:
    """Return a file's text with the block, or other lines, between its markers. Raises ValueError if it has
    no markers.
    """
    begin, end = (f"{MARKER}{block.marker}: {edge}." for edge in ("begin", "end"))
    head, marker, rest = text.partition(begin)
    old, end_marker, tail = rest.partition(end)
    if not marker or not end_marker:
        raise ValueError(f"{block.path} has no lines {begin!r} and {end!r}")
    rest_of_line = old.partition("\n")[0]
    comment = old.rpartition("\n")[2]
    body = "\n".join(block.lines() if lines is None else lines)
    return f"{head}{begin}{rest_of_line}\n{body}\n{comment}{end}{tail}"


def main() -> None:
    for block in BLOCKS:
        path = ROOT / block.path
        path.write_text(written(path.read_text(), block))


if __name__ == "__main__":
    main()
