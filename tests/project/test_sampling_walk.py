"""A sampling parameter is said once: few files know one by name, but for what is written from the table."""

from __future__ import annotations

import re
from functools import cache

import pytest

from runtime.sampling.generate import BLOCKS, written
from runtime.sampling.table import PARAMETERS
from tests.harness.sources import ROOT

PRODUCT = ("carousel", "detokenizer_proc", "model_worker", "runtime", "scheduler_proc", "tokenizer_proc")
TABLE = "runtime/sampling/table.py"
SAMPLES = ("model_worker/sampling/", "model_worker/kernels/")
MOST_FILES = 8
MOST_OTHERS = 1
"""That neither sample nor are the table."""
DRAWN_BY = [
    p.name
    for p in PARAMETERS
    if p.columns and p.name not in ("logprobs", "min_tokens", "seed", "temperature")
]


@cache
def texts() -> dict[str, str]:
    """Text of each product file, but for what is written from the table."""
    found = {}
    for path in (path for top in PRODUCT for path in (ROOT / top).rglob("*")):
        if path.suffix not in (".py", ".h", ".cpp"):
            continue
        text, place = path.read_text(), str(path.relative_to(ROOT))
        for block in BLOCKS:
            if block.path == place:
                text = written(text, block, [])
        found[place] = text
    return found


def files_with(name: str) -> list[str]:
    word = re.compile(rf"\b{name}\b")
    return [place for place, text in texts().items() if word.search(text)]


@pytest.mark.parametrize("name", DRAWN_BY)
def test_few_files_know_a_parameter_by_name(name: str) -> None:
    found = files_with(name)
    assert TABLE in found
    assert len(found) <= MOST_FILES, found
    others = [place for place in found if place != TABLE and not place.startswith(SAMPLES)]
    assert len(others) <= MOST_OTHERS, others
