"""The examples of docs/adding_a_policy.md work, and docs/batching.md names what there is."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.settings.config import PRESETS
from scheduler_proc.batching.phases import BATCHING_TYPES
from scheduler_proc.capacity import CAPACITY_POLICIES
from scheduler_proc.policy import POLICIES
from tests.harness.scheduler.scheduler_parts import message, run_until_idle, running

DOCS = Path(__file__).resolve().parents[2] / "docs"
REQUESTS = [message(i, [i + 1] * (9 - i), max_tokens=4) for i in range(3)]


@pytest.fixture(scope="module", autouse=True)
def documented() -> Iterator[None]:
    """All classes of the page, importable as from a package of the user's."""
    module = types.ModuleType("documented")
    for block in re.findall(r"```python\n(.*?)```", (DOCS / "adding_a_policy.md").read_text(), re.DOTALL):
        exec(block, module.__dict__)
    sys.modules["documented"] = module
    yield
    del sys.modules["documented"]


def closed_order(**settings: str) -> list[int]:
    with running(max_rows=1, **settings) as system:
        run_until_idle(system, *REQUESTS)
        return [handle[8] for handle in system.detokenizer.closed]


@pytest.mark.parametrize("name", ["LastComeFirst", "SmallPromptsFirst"])
def test_an_order_of_the_page_is_obeyed(name: str) -> None:
    assert closed_order(policy=f"documented:{name}") == [2, 1, 0]


def test_the_order_by_time_and_luck_is_one() -> None:
    assert sorted(closed_order(policy="documented:LongWaitOrLuck")) == [0, 1, 2]


def test_the_micro_batch_scheduler_of_the_page_works() -> None:
    assert closed_order(micro_batch_scheduler="documented:OnePromptAStep") == [0, 1, 2]


@pytest.mark.parametrize("name", [*BATCHING_TYPES, *CAPACITY_POLICIES, *POLICIES, *PRESETS])
def test_the_page_names_what_there_is(name: str) -> None:
    assert re.search(rf"`{name}`|\*\*{name}\*\*|preset {name}`", (DOCS / "batching.md").read_text())
