"""Starters: what has put this command on several machines says in its environment which of them this is.

Read where `--executor nodes` is given without `--nnodes`, and nowhere else: inside a job that has several
nodes for another reason a launch stays what its command line says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from runtime.base.environment import starter_variables
from runtime.base.errors import ConfigError
from runtime.settings.config import RuntimeConfig


class Starter(NamedTuple):
    """Variables of the environment in which one starter says what it has started."""

    name: str
    num_nodes: str
    node_rank: str
    address: str = ""
    """Name of the variable with node 0's address; empty where the starter does not say it."""
    num_here: str = ""
    """Name of the variable with the number of processes that it has started on this machine: one launcher is
    to be on each.
    """


STARTERS = (
    Starter("LeaderWorkerSet", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS"),
    Starter("torchrun", "WORLD_SIZE", "RANK", "MASTER_ADDR", "LOCAL_WORLD_SIZE"),
    Starter(
        "Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", num_here="OMPI_COMM_WORLD_LOCAL_SIZE"
    ),
    Starter(
        "Slurm", "SLURM_STEP_NUM_NODES", "SLURM_NODEID", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"
    ),
)
VARIABLES = frozenset(filter(None, (variable for starter in STARTERS for variable in starter[1:])))
HOSTS = re.compile(r"(?P<before>[^\[,]+)(?:\[(?P<first>\d+)[^\]]*\](?P<behind>[^,]*))?")
"""The first of a list of hosts as Slurm writes it: a1,a2 or a[01-03,07] or a[01-03].example."""


def with_starter(config: RuntimeConfig, environment: Mapping[str, str] | None = None) -> RuntimeConfig:
    """Return the settings with what the starter says, where they ask for it. Raises ConfigError."""
    if config.executor != "nodes" or config.nnodes > 1:
        return config
    environment = starter_variables(VARIABLES) if environment is None else environment
    starter = next(
        (each for each in STARTERS if {each.num_nodes, each.node_rank} <= environment.keys()), None
    )
    if starter is None:
        names = ", ".join(each.name for each in STARTERS)
        raise ConfigError(
            f"executor: nodes needs --nnodes, or the environment of {names}, which is not here; say how many "
            "nodes there are"
        )
    num_here = environment.get(starter.num_here, "1").partition("(")[0]
    if num_here != "1":
        raise ConfigError(
            f"executor: {starter.name} has started {num_here} processes here ({starter.num_here}); "
            "start one on each, which starts the ranks there"
        )
    found = {
        "nnodes": _number(starter.num_nodes, environment),
        "node_rank": _number(starter.node_rank, environment),
    }
    address = config.dist_addr or first_host(environment.get(starter.address, ""))
    try:
        return msgspec.convert(
            {**msgspec.structs.asdict(config), **found, "dist_addr": address}, RuntimeConfig
        )
    except msgspec.ValidationError as error:
        raise ConfigError(f"executor: the environment of {starter.name}: {error}") from None


def first_host(hosts: str) -> str:
    """Return the first of a list of hosts; empty for an empty one."""
    found = HOSTS.match(hosts)
    return "".join(part or "" for part in found.groups()) if found else ""


def _number(variable: str, environment: Mapping[str, str]) -> int:
    text = environment[variable]
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"executor: {variable} is {text!r}, which is no number")
    return int(text)
