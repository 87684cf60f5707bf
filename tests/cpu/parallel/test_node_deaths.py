"""Twenty deaths of each kind on two nodes, ten with ranks that add up and ten with stages. Needs root."""

from __future__ import annotations

import os
import shutil

import pytest

from tests.cpu.parallel.node_deaths import KINDS, run

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        os.getuid() != 0 or shutil.which("ip") is None, reason="networks of their own need root and ip"
    ),
]
EACH = 10


@pytest.mark.parametrize("layout", ["ranks", "stages"])
def test_deaths_and_cuts_at_random_moments_cost_no_stream(layout: str) -> None:
    report = run(EACH, layout)
    print(report)
    assert report["wrong"] == []
    assert report["left"] == []
    assert report["exit_code"] == 0
    assert report["figures"].keys() == set(KINDS)
