"""Two nodes with networks of their own and a cable between them, which is cut. Needs root."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator

import pytest

from carousel import Client
from tests.cpu.parallel.test_nodes_launch import POOL, streams_of
from tests.harness.nodes import Apart, Nodes, apart, nodes
from tests.harness.ring.launched import is_alive, leftovers, wait_until

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        os.getuid() != 0 or shutil.which("ip") is None, reason="networks of their own need root and ip"
    ),
]


@pytest.fixture(scope="module")
def cable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    with apart(tmp_path_factory.mktemp("cable")) as networks:
        yield networks


@pytest.fixture(scope="module")
def two_nodes(cable: Apart) -> Iterator[Nodes]:
    with nodes(*POOL, apart=cable) as both:
        yield both


@pytest.fixture(scope="module")
def expected(two_nodes: Nodes) -> list[list[int]]:
    with Client(two_nodes.run_dir) as client:
        return streams_of(client, lambda: None)


@pytest.mark.parametrize(("seconds", "restarts"), [(1.0, False), (8.0, True)])
def test_a_cut_costs_no_request(
    two_nodes: Nodes, cable: Apart, expected: list[list[int]], seconds: float, restarts: bool
) -> None:
    """One of a second restarts nothing."""
    epoch = two_nodes.zero.state()["epoch"]
    with Client(two_nodes.run_dir) as client:
        began = time.monotonic()
        assert streams_of(client, lambda: cable.cut(seconds)) == expected
        print(f"a cut of {seconds:g} s: all streams whole after {time.monotonic() - began:.1f} s")
    assert (two_nodes.zero.state()["epoch"] > epoch) == restarts


def test_a_node_that_is_cut_off_for_good_ends_its_ranks(two_nodes: Nodes, cable: Apart) -> None:
    """The last test of this launch: node 0 is stopped meanwhile, and both leave nothing."""
    rank = two_nodes.pid_of_rank(1)
    pids = [*two_nodes.zero.pids(), *two_nodes.other.pids()]
    cable.down()
    wait_until(lambda: not is_alive(rank), 20.0, "its rank is ended")
    assert two_nodes.zero.stop() == 0
    cable.up()
    assert two_nodes.other.wait_exit(10.0) == 70
    wait_until(lambda: not any(is_alive(pid) for pid in pids), 5.0, "all processes end")
    assert not leftovers(two_nodes.zero.run_dir)
    assert not leftovers(two_nodes.other.run_dir)
