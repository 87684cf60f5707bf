"""Two nodes with networks of their own and a cable between them, which is cut, or slow. Needs root."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from carousel import Client, SamplingParams
from tests.cpu.parallel.test_nodes_launch import TIMEOUT_S, streams_of
from tests.harness.nodes import DELAY_S, MAY_BE_APART, POOL, Apart, Nodes, apart, nodes
from tests.harness.ring.launched import Launched, is_alive, leftovers, wait_until

PROMPTS = [list(range(100, 130 + 20 * n)) for n in range(4)]
NUM_TOKENS = 16

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not MAY_BE_APART, reason="networks of their own need root, ip and /dev/net/tun"),
]


@pytest.fixture(scope="module")
def cable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    with apart(tmp_path_factory.mktemp("cable")) as networks:
        yield networks


@pytest.fixture(scope="module", params=[(1, 2), (2, 1)], ids=["ranks", "stages"])
def two_nodes(cable: Apart, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    with nodes(*POOL, apart=cable, layout=request.param) as both:
        yield both


@pytest.fixture(scope="module")
def expected(two_nodes: Nodes) -> list[list[int]]:
    with Client(two_nodes.run_dir) as client:
        return streams_of(client, lambda: None)


@pytest.mark.parametrize("layout", [(2, 1), (1, 2), (2, 2)])
def test_two_milliseconds_between_the_nodes_change_no_token(
    layout: tuple[int, int], demo_launch: Launched, tmp_path: Path
) -> None:
    """Stages of one rank and of two, and ranks that add up over the cable; the start is slow, too."""
    asked = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with Client(demo_launch.run_dir) as client:
        wanted = client.generate(PROMPTS, [asked] * len(PROMPTS), timeout=TIMEOUT_S)
    with (
        apart(tmp_path, DELAY_S) as slow,
        nodes(*POOL, apart=slow, layout=layout) as both,
        Client(both.run_dir) as client,
    ):
        began = time.monotonic()
        done = client.generate(PROMPTS, [asked] * len(PROMPTS), timeout=TIMEOUT_S)
        assert time.monotonic() - began > NUM_TOKENS * 2 * DELAY_S, "the cable takes no time"
        assert [each.token_ids for each in done] == [each.token_ids for each in wanted]


def seen_from_here(launch: Launched, pid: int) -> int:
    """Return what number a process of a container has outside of it."""
    main = launch.process.pid
    first = Path(f"/proc/{main}/task/{main}/children").read_text().split()[0]
    container = os.readlink(f"/proc/{first}/ns/pid")
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is nobody that this user may look at
            numbers = (entry / "status").read_text().split("NSpid:")[1].splitlines()[0].split()
            if os.readlink(entry / "ns" / "pid") == container and int(numbers[-1]) == pid:
                return int(entry.name)
    raise ProcessLookupError(f"no process {pid} in there")


@pytest.mark.skipif(shutil.which("unshare") is None, reason="containers are made by unshare")
def test_nodes_that_share_no_process_and_no_memory_have_the_tokens_and_outlive_a_rank(
    demo_launch: Launched, tmp_path: Path
) -> None:
    """The other one is in a container, whose first process is its agent, as in a pod."""
    asked = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with Client(demo_launch.run_dir) as client:
        wanted = client.generate(PROMPTS, [asked] * len(PROMPTS), timeout=TIMEOUT_S)
    with (
        apart(tmp_path, DELAY_S, contained=True) as slow,
        nodes(*POOL, apart=slow, layout=(2, 2)) as both,
        Client(both.run_dir) as client,
    ):
        assert both.other.state()["pid"] == 1
        done = client.generate(PROMPTS, [asked] * len(PROMPTS), timeout=TIMEOUT_S)
        assert [each.token_ids for each in done] == [each.token_ids for each in wanted]
        streams = streams_of(client, lambda: None)
        rank = seen_from_here(both.other, both.pid_of_rank(3))
        assert streams_of(client, lambda: os.kill(rank, signal.SIGKILL)) == streams
        assert both.zero.stop() == 0
        assert both.other.wait_exit(10.0) == 0


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
