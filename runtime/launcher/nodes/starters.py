"""Starters: programs that start a command on several machines (such as Slurm or torchrun), and the
environment variables in which they say which machine this is.

The variables are only read where `--executor nodes` is given without `--nnodes`. In a job that has several
nodes for another reason a launch does just what its command line says.
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
    """Environment variables of one starter."""

    name: str
    num_nodes: str
    node_rank: str
    address: str = ""
    """Variable with node 0's address; empty if the starter has none."""
    num_here: str = ""
    """Variable with the number of processes that it has started on this machine, which must be one launcher.
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
"""Pattern for the first entry of a Slurm host list: a1,a2 or a[01-03,07] or a[01-03].example."""


def with_starter(config: RuntimeConfig, environment: Mapping[str, str] | None = None) -> RuntimeConfig:
    """Return the settings completed from the starter's variables, if they ask for it. Raises ConfigError."""
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
    """Return the first host of a list; empty for an empty list."""
    found = HOSTS.match(hosts)
    return "".join(part or "" for part in found.groups()) if found else ""


def _number(variable: str, environment: Mapping[str, str]) -> int:
    text = environment[variable]
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(f"executor: {variable} is {text!r}, which is no number")
    return int(text)
