"""Fixture that files of this folder share: two nodes with a pipeline stage each, in one launch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext

import pytest

from tests.harness.nodes import DELAY_S, MAY_BE_APART, SMALL_POOL, Apart, Nodes, apart, nodes

SETTINGS = (
    *("--gather-context-logits", "--gather-generation-logits", "--max-engine-restarts", "100"),
    *("--worker-extension-cls", "tests.harness.probe:Probe"),
)


@pytest.fixture(scope="package")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """Nodes whose ranks can be called, 2 ms from each other where networks of their own are allowed. Rank 1,
    on node 1, samples. The last test of test_pipeline_launch.py ends them.
    """
    with ExitStack() as stack:
        slow: AbstractContextManager[Apart | None] = (
            apart(tmp_path_factory.mktemp("cable"), DELAY_S) if MAY_BE_APART else nullcontext()
        )
        cable = stack.enter_context(slow)
        yield stack.enter_context(nodes(*SMALL_POOL, *SETTINGS, apart=cable, layout=(2, 1)))
