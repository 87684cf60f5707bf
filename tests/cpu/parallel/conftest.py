"""Fixture that files of this folder share: two nodes with a rank each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.nodes import POOL, Nodes, nodes


@pytest.fixture(scope="package")
def two_nodes() -> Iterator[Nodes]:
    """Nodes whose ranks can be called. The last test of test_nodes_launch.py ends them."""
    settings = (*POOL, "--worker-extension-cls", "tests.harness.probe:Probe")
    with nodes(*settings, "--max-engine-restarts", "100") as both:
        yield both
