"""tests/ledger.md names tests: each of them is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = re.compile(
    r"`((?:tests|benchmarks|docs|examples|scheduler_proc|model_worker|runtime)/[\w/.]+?)(?:::(\w+))?`"
)


def test_every_file_and_test_that_the_table_names_is_there() -> None:
    text = (ROOT / "tests" / "ledger.md").read_text()
    references = REFERENCE.findall(text)
    assert len(references) > 100
    wrong = []
    for name, test in references:
        path = ROOT / name
        if not path.exists() or (test and f"def {test}" not in path.read_text()):
            wrong.append(f"{name}::{test}")
    assert wrong == []


def test_every_row_says_where_it_stands() -> None:
    rows = re.findall(r"^\| ([A-Z]{2}-\d+) \|(.*)\|(.*)\|$", (ROOT / "tests" / "ledger.md").read_text(), re.M)
    assert len(rows) == 516
    assert len({row_id for row_id, _, _ in rows}) == len(rows)
    assert [row_id for row_id, what, where in rows if len(what) < 4 or len(where) < 4] == []
