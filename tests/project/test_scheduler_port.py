"""Nothing in the scheduler but its port asks for the time, draws, or starts a thread: else no recorded run
could be replayed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.sources import ROOT

PORT = ROOT / "scheduler_proc/port.py"
MODULES = {"time", "random", "secrets", "uuid", "threading", "concurrent", "asyncio", "numpy.random"}
"""Modules of clocks, of randomness, and of what happens at a moment of its own."""
CALLS = {
    "urandom",
    "getrandom",
    "monotonic",
    "monotonic_ns",
    "perf_counter",
    "perf_counter_ns",
    "now",
    "utcnow",
}
"""Names of methods that ask for it by another module, such as os.urandom and datetime.now."""


def breaches(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            if node.module == "os":
                yield from (name for name in names if name.removeprefix("os.") in CALLS)
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node).replace("np.", "numpy.")]
            owner = ast.unparse(node.value)
            if node.attr in CALLS and owner.partition(".")[0] in ("os", "datetime", "date"):
                yield ast.unparse(node)
        yield from (name for name in names if any(f"{name}.".startswith(f"{each}.") for each in MODULES))


def test_only_the_port_knows_time_and_randomness() -> None:
    paths = sorted((ROOT / "scheduler_proc").rglob("*.py"))
    assert PORT in paths
    wrong = {
        str(path.relative_to(ROOT)): found
        for path in paths
        if path != PORT and (found := sorted(set(breaches(path.read_text()))))
    }
    assert not wrong, f"take it from scheduler_proc.port, as `now_s` or `rng`: {wrong}"


@pytest.mark.parametrize(
    "text",
    [
        "import time",
        "import time as t",
        "from time import monotonic",
        "import random",
        "import secrets, uuid",
        "from os import urandom",
        "import os\nos.urandom(8)",
        "import os\nread = os.urandom",
        "import numpy as np\nrng = np.random.default_rng()",
        "from numpy.random import default_rng",
        "from datetime import datetime\ndatetime.now()",
        "import datetime\ndatetime.datetime.utcnow()",
        "def inner():\n    import threading",
    ],
)
def test_each_way_around_the_port_is_found(text: str) -> None:
    assert list(breaches(text))


def test_what_only_looks_like_it_is_allowed() -> None:
    lines = ("serving.now()", "port.rng.random()", "datetime.fromtimestamp(0.0)", "os.getpid()")
    assert not [*breaches("\n".join(lines))]


def test_the_port_stands_where_the_table_says() -> None:
    assert list(breaches(Path(PORT).read_text()))
