"""Which node this is, by the environment of what has started it."""

from __future__ import annotations

import pytest

from runtime.base.errors import ConfigError
from runtime.launcher.nodes.starters import first_host, with_starter
from runtime.settings.config import RuntimeConfig
from tests.harness.cases import for_each

NODES = RuntimeConfig(executor="nodes")
LWS = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "model-0.model.default"}
TORCHRUN = {"WORLD_SIZE": "3", "RANK": "2", "MASTER_ADDR": "10.0.0.1", "LOCAL_WORLD_SIZE": "1"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
}
SLURM = {
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_NODEID": "3",
    "SLURM_STEP_NODELIST": "gpu[07-09,12].site",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
}


@for_each(
    ("environment", "found"),
    [
        (LWS, (2, 1, "model-0.model.default")),
        (TORCHRUN, (3, 2, "10.0.0.1")),
        (OPEN_MPI, (2, 0, "")),
        (SLURM, (4, 3, "gpu07.site")),
    ],
)
def test_a_starter_says_which_node_this_is(environment: dict[str, str], found: tuple[int, int, str]) -> None:
    config = with_starter(NODES, environment)
    assert (config.nnodes, config.node_rank, config.dist_addr) == found


def test_what_the_command_line_says_wins() -> None:
    named = RuntimeConfig(executor="nodes", dist_addr="10.0.0.9:1234")
    assert with_starter(named, LWS).dist_addr == "10.0.0.9:1234"
    both = RuntimeConfig(executor="nodes", nnodes=3)
    assert with_starter(both, LWS) is both


def test_nobody_is_asked_without_executor_nodes() -> None:
    assert with_starter(RuntimeConfig(), LWS).nnodes == 1


@for_each(
    ("environment", "said"),
    [
        ({}, "executor: nodes needs --nnodes, or the environment of LeaderWorkerSet, torchrun"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "2"}, "executor: torchrun has started 2 processes here"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, "executor: Slurm has started 8 processes"),
        ({**LWS, "LWS_GROUP_SIZE": "two"}, "executor: LWS_GROUP_SIZE is 'two', which is no number"),
        ({**LWS, "LWS_GROUP_SIZE": "1000"}, "executor: the environment of LeaderWorkerSet: "),
    ],
)
def test_what_makes_no_sense_is_refused(environment: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        with_starter(NODES, environment)
    assert str(refused.value).startswith(said)


@for_each(
    ("hosts", "first"),
    [
        ("", ""),
        ("a1", "a1"),
        ("a1,b2", "a1"),
        ("a[01-03,07]", "a01"),
        ("a[5],b", "a5"),
        ("a-[1-2].x,b", "a-1.x"),
    ],
)
def test_the_first_of_a_list_of_hosts(hosts: str, first: str) -> None:
    assert first_host(hosts) == first
