"""Deaths and cut cables on two nodes: six in a row under the same 32 streams, and ten of each kind with ranks
that add up, and with stages. The long ones need networks of their own, and so root.
"""

from __future__ import annotations

import os
import random
import shutil

import pytest

from tests.cpu.parallel.node_deaths import KINDS, SIX, Deaths, Wave, run
from tests.harness.nodes import Nodes
from tests.harness.ring.launched import Launched

EACH = 10
STREAM_LEN = 48
MOST_BETWEEN = 5
"""Tokens of each stream, on average, between one death and the next."""


def test_six_deaths_and_cuts_in_a_row_cost_no_stream(two_nodes: Nodes, demo_launch: Launched) -> None:
    """In a pool that has room for a quarter of them. Who has called a rank that dies in the call is told."""
    expected = Wave(demo_launch.run_dir, STREAM_LEN)
    deaths = Deaths(two_nodes, random.Random(), expected)
    deaths.run_in_turn(SIX, MOST_BETWEEN)
    print(dict(deaths.figures))
    assert deaths.wrong == []
    assert deaths.figures.keys() == set(SIX)
    assert deaths.figures["cut 1 s"] == [{}]


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("ip") is None, reason="networks of their own need root and ip"
)
@pytest.mark.parametrize("layout", ["ranks", "stages"])
def test_deaths_and_cuts_at_random_moments_cost_no_stream(layout: str) -> None:
    report = run(EACH, layout)
    print(report)
    assert report["wrong"] == []
    assert report["left"] == []
    assert report["exit_code"] == 0
    assert report["figures"].keys() == set(KINDS)
