"""Verdicts of the stages' files on the project's bars: met, missed, or not measured.

python -m benchmarks.gpu.bars DIR        a table, and DIR/bars.json; exit code 1 when a bar is missed
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

REPORT = "bars.json"
MAX_STAGE_S = 480.0


class Bar(NamedTuple):
    name: str
    value: float | None
    """Measured value; None: not measured."""
    limit: float
    at_least: bool

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        is_met = self.value >= self.limit if self.at_least else self.value <= self.limit
        return "met" if is_met else "missed"


def bars(folder: Path) -> Iterator[Bar]:
    yield Bar("tests that failed", _failures(folder), 0, at_least=False)
    yield from _attention(_read(folder / "kernels.json"))
    yield from _decode(folder)
    for model in ("qwen3-0.6b", "llama-3.1-8b"):
        ratios = _read(folder / f"baseline-{model}.json").get("ratios", ())
        ratio = _matching(ratios, equal_attention=True).get("ratio")
        name = f"{model}: HTTP over the library's batching, torch's attention in both"
        yield Bar(name, ratio, 4.0, at_least=True)
    for path in sorted(folder.glob("*.json")):
        if path.name != REPORT:
            seconds = _read(path).get("seconds")
            yield Bar(f"seconds of {path.stem}", seconds, MAX_STAGE_S, at_least=False)


def _attention(kernels: dict[str, Any]) -> Iterator[Bar]:
    for page_size in (1, 16):
        found = _matching(kernels.get("decode", ()), batch=64, context=4096, page_size=page_size)
        value = found.get("of_copy_rate")
        yield Bar(f"decode attention, pages of {page_size}: of the copy rate", value, 0.8, at_least=True)
    value = kernels.get("prompt", {}).get("of_matrix_rate")
    yield Bar("prompt attention: of the matrix rate", value, 0.6, at_least=True)


def _decode(folder: Path) -> Iterator[Bar]:
    large, small = (_read(folder / f"decode-{model}.json") for model in ("llama-3.1-8b", "qwen3-0.6b"))

    def step(result: dict[str, Any], batch: int, *, overlap: bool = True) -> dict[str, Any]:
        return _matching(result.get("ms", ()), batch=batch, graphs=True, overlap=overlap)

    for batch, limit in ((1, 1.25), (8, 1.3), (64, 1.3), (256, 1.4)):
        value = step(large, batch).get("of_floor")
        yield Bar(f"llama-3.1-8b, batch {batch}: step over its floor", value, limit, at_least=False)
    yield Bar("qwen3-0.6b, batch 1: step, ms", step(small, 1).get("step"), 0.9, at_least=False)
    for batch in (1, 64):
        gap = step(small, batch).get("gap")
        yield Bar(f"qwen3-0.6b, batch {batch}: idle gap, ms", gap, 0.02, at_least=False)
    for batch in (1, 64, 256):
        on, off = step(small, batch), step(small, batch, overlap=False)
        removed = slower = None
        if on and off:
            removed = 1.0 - on["gap"] / off["gap"] if off["gap"] > 0 else 1.0
            slower = on["step"] / off["step"]
        name = f"qwen3-0.6b, batch {batch}: "
        yield Bar(name + "share of the gap that overlap removes", removed, 0.8, at_least=True)
        yield Bar(name + "step with overlap over without", slower, 1.0, at_least=False)


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a stage's file; {} if the stage has not run."""
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return result


def _matching(entries: Any, **wanted: Any) -> dict[str, Any]:
    """Return the entry with these values; {} if it was not measured, or could not be."""
    found = (each for each in entries if "error" not in each and wanted.items() <= each.items())
    return next(found, {})


def _failures(folder: Path) -> float | None:
    """Return how many tests failed in all pytest reports; None if no test ran, or all were skipped."""
    reports = [ElementTree.parse(path) for path in sorted(folder.glob("*test*.xml"))]
    suites = [suite for report in reports for suite in report.getroot().iter("testsuite")]

    def total(kind: str) -> int:
        return sum(int(suite.get(kind, "0")) for suite in suites)

    return float(total("failures") + total("errors")) if total("tests") > total("skipped") else None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="the --out of the stages")
    folder: Path = parser.parse_args(argv).folder
    found = list(bars(folder))
    for bar in found:
        value = "" if bar.value is None else f"{bar.value:.3g}"
        sign = ">=" if bar.at_least else "<="
        print(f"{bar.name:<72}{value:>9} {sign} {bar.limit:<6g}{bar.verdict}")
    report = [{**bar._asdict(), "verdict": bar.verdict} for bar in found]
    (folder / REPORT).write_text(json.dumps(report, indent=1))
    return 1 if any(bar.verdict == "missed" for bar in found) else 0


if __name__ == "__main__":
    sys.exit(main())
