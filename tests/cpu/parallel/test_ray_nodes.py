"""A launch whose other node Ray has found: real raylets, at loopback addresses of this machine."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from carousel import Client, RayExecutor, RequestError, SamplingParams
from tests.cpu.parallel.test_nodes_launch import STREAM_TOKENS, TIMEOUT_S, streams_of, tokens_of
from tests.harness.nodes import HOST, NUM_PORTS, OTHER, POOL, THIRD, ids_of, listening_hosts
from tests.harness.ring.launched import Launched, free_ports, is_alive, launched, wait_until

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray: pip install -e '.[ray]'"),
]
IDLE_S = 10.0
AGAIN_S = 60.0
"""Longest time until Ray sees that a raylet is gone and starts an actor elsewhere."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Three machines, of which a launch takes two."""
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    args = {"num_cpus": 1, "node_ip_address": HOST, "include_dashboard": False}
    made = import_module("ray.cluster_utils").Cluster(initialize_head=True, head_node_args=args)
    made.others = {host: made.add_node(num_cpus=1, node_ip_address=host) for host in (OTHER, THIRD)}
    patch.setenv("RAY_ADDRESS", made.address)
    yield made
    made.shutdown()
    patch.undo()


@pytest.fixture(scope="module")
def launch(cluster: Any) -> Iterator[Launched]:
    port = free_ports(NUM_PORTS, HOST)
    arguments = (
        "--executor",
        "ray",
        "--nnodes",
        "2",
        "--tp-size",
        "2",
        "--device",
        "cpu",
        "--cpu-threads",
        "1",
    )
    with launched(*arguments, "--dist-addr", f"{HOST}:{port}", *POOL, is_cold=True) as started:
        yield started


@pytest.fixture(scope="module")
def expected(launch: Launched) -> list[list[int]]:
    with Client(launch.run_dir) as client:
        return streams_of(client, lambda: None)


class Agent(NamedTuple):
    pid: int
    rank_pid: int
    address: str


def agent_of(launch: Launched) -> Agent:
    """The agent whose rank serves now, and the address at which that listens."""
    (rank,) = (child["pid"] for child in launch.state()["children"] if child["node"] == 1)
    (address,) = listening_hosts([rank])
    return Agent(parent_of(rank), rank, address)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().split("PPid:")[1].split()[0])


def oom_score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def placer_of(launch: Launched) -> int:
    """Return the process that asks Ray."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):
            is_child = f"\nPPid:\t{launch.process.pid}\n" in (entry / "status").read_text()
            if is_child and b"ray_placer" in (entry / "cmdline").read_bytes():
                return int(entry.name)
    raise ProcessLookupError("nobody asks Ray")


def states_of_groups(cluster: Any) -> set[str]:
    """States of the placement groups that there have been."""
    ray = import_module("ray")
    ray.init(address=cluster.address, log_to_driver=False)
    table = import_module("ray.util").placement_group_table()
    ray.shutdown()
    return {group["state"] for group in table.values()}


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_no_process_of_a_step_can_call_ray_and_idle_ranks_rest(launch: Launched) -> None:
    """Ray is loaded by the process that asks it and by the actors, which hear nothing of steps."""
    asked = SamplingParams(max_tokens=350, ignore_eos=True)
    with Client(launch.run_dir) as client:
        for _ in range(3):
            client.generate(ids_of(0), asked, timeout=TIMEOUT_S)
        assert client.collective_rpc("ping", timeout=TIMEOUT_S)[1]["num_steps"] >= 1000
    agent = agent_of(launch)
    ranks = [launch.pid_of("worker", 0), agent.rank_pid]
    for pid in (launch.process.pid, launch.pid_of("scheduler"), agent.pid, *ranks):
        assert "_raylet" not in Path(f"/proc/{pid}/maps").read_text()
    assert "_raylet" in Path(f"/proc/{placer_of(launch)}/maps").read_text()
    assert len({os.getpriority(os.PRIO_PROCESS, pid) for pid in ranks}) == 1, "Ray's workers are nicer"
    raylet = parent_of(parent_of(agent.pid))
    assert oom_score(agent.pid) == oom_score(raylet), "Ray's workers are the first that the kernel takes"
    assert oom_score(agent.rank_pid) == min(1000, oom_score(raylet) + 300)
    before = [cpu_seconds(pid) for pid in ranks]
    time.sleep(IDLE_S)
    shares = [(cpu_seconds(pid) - was) / IDLE_S for pid, was in zip(ranks, before, strict=True)]
    print(f"idle ranks take {shares} of a core")
    assert max(shares) <= 0.02


def test_the_tokens_are_those_of_one_machine(launch: Launched) -> None:
    with launched("--tp-size", "2", *POOL) as alone, Client(alone.run_dir) as client:
        wanted = tokens_of(client)
    with Client(launch.run_dir) as client:
        assert tokens_of(client) == wanted
    assert agent_of(launch).address in (OTHER, THIRD)


def test_an_agent_that_is_killed_comes_back(launch: Launched, expected: list[list[int]]) -> None:
    before = agent_of(launch)
    with Client(launch.run_dir) as client:
        assert streams_of(client, lambda: os.kill(before.pid, signal.SIGKILL)) == expected
    after = agent_of(launch)
    assert after.address == before.address
    assert after.pid != before.pid


def test_the_process_that_asks_ray_is_replaced(launch: Launched, expected: list[list[int]]) -> None:
    """With it end the actors, and their agents: all are placed again."""
    before, asks = agent_of(launch), placer_of(launch)
    epoch = launch.state()["epoch"]
    with Client(launch.run_dir) as client:
        assert streams_of(client, lambda: os.kill(asks, signal.SIGKILL)) == expected
        wait_until(lambda: launch.state()["epoch"] > epoch, AGAIN_S, "the engine has started again")
        assert streams_of(client, lambda: None) == expected
    assert agent_of(launch).pid != before.pid
    assert placer_of(launch) != asks


def test_a_machine_that_is_lost_is_replaced(
    cluster: Any, launch: Launched, expected: list[list[int]]
) -> None:
    """The raylet is killed, and what it had started ends with it."""
    before = agent_of(launch)
    epoch = launch.state()["epoch"]

    def lose() -> None:
        cluster.remove_node(cluster.others[before.address], allow_graceful=False)
        wait_until(lambda: not is_alive(before.pid), AGAIN_S, "the agent ends with its raylet")

    with Client(launch.run_dir) as client:
        assert streams_of(client, lose) == expected
    assert launch.state()["epoch"] > epoch
    assert {agent_of(launch).address} == {OTHER, THIRD} - {before.address}


def test_ctrl_c_gives_the_group_back_and_leaves_no_agent(cluster: Any, launch: Launched) -> None:
    """The last test of this launch."""
    agent = agent_of(launch)
    pids = [*launch.pids(), agent.pid, agent.rank_pid]
    assert launch.stop() == 0
    wait_until(lambda: not any(is_alive(pid) for pid in pids), 5.0, "all processes end")
    assert states_of_groups(cluster) == {"REMOVED"}


def test_an_executor_of_rays_machines_generates_and_calls_its_ranks(
    cluster: Any, launch: Launched, expected: list[list[int]]
) -> None:
    """It ends the launch that it has started; the one before has ended, so that there is room."""
    assert launch.process.poll() == 0
    settings: dict[str, Any] = {
        "dist_addr": f"{HOST}:{free_ports(NUM_PORTS, HOST)}",
        "device": "cpu",
        "nnodes": 2,
        "tp_size": 2,
        "cpu_threads": 1,
        "dtype": "float32",
        "max_total_tokens": 512,
        "max_running_requests": 24,
        "skip_tokenizer_init": True,
    }
    sampling = SamplingParams(
        max_tokens=STREAM_TOKENS, min_tokens=STREAM_TOKENS, ignore_eos=True, seed=0, temperature=0.0
    )
    with RayExecutor.create(**settings) as executor:
        state = json.loads((executor.run_dir / "state.json").read_bytes())
        assert executor.generate(ids_of(0), sampling).result(TIMEOUT_S).token_ids == expected[0]
        assert [answer["rank"] for answer in executor.collective_rpc("ping", timeout=TIMEOUT_S)] == [0, 1]
        with pytest.raises(RequestError, match="rank 0 on node 0: AttributeError: there is no method"):
            executor.collective_rpc("missing", timeout=TIMEOUT_S)
        assert executor.generate(ids_of(0), sampling).result(TIMEOUT_S).token_ids == expected[0]
    pids = [state["pid"], *(child["pid"] for child in state["children"])]
    wait_until(lambda: not any(is_alive(pid) for pid in pids), 5.0, "all processes end")
    assert states_of_groups(cluster) == {"REMOVED"}
