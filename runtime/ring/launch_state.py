"""state.json: state of a launch, for all processes that can read its run directory. It is replaced as a
whole.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec


class ChildState(msgspec.Struct, frozen=True):
    role: str
    index: int
    pid: int
    """Process id; 0 while the process is about to be restarted."""
    epoch: int
    ready: bool
    node: int = 0
    """Number of the node that the process is on."""


class LaunchState(msgspec.Struct, frozen=True):
    launch_id: str
    state: str
    """State of the launcher: loading, ready, draining, failed."""
    epoch: int
    """Number of the launch's last restart: 1 at the start; each restart of a process or of the engine takes
    the next.
    """
    pid: int
    guardian_pid: int
    """Process id of the guardian, which removes the directory if the launcher is killed."""
    host: str
    port: int
    zmq_bind: str
    model: str
    children: list[ChildState]
    restarts: Mapping[str, int]
    """Number of restarts since the start, by process; `engine` stands for scheduler and workers."""
    info: Mapping[str, int | float | str]
    """Facts that processes reported when they became ready, such as num_pages."""
    error: str
    """Name of the process that failed and the reason, once the launch ends because of it; otherwise empty."""
    exit_code: int


class _Served(msgspec.Struct):
    zmq_bind: str


def read_zmq_bind(path: Path) -> str:
    """Return the TCP address of a launch from its state file; "" if it has none. Raises OSError if the file
    cannot be read, msgspec.MsgspecError if it is invalid.
    """
    return msgspec.json.decode(path.read_bytes(), type=_Served).zmq_bind


def write_atomically(path: Path, data: bytes) -> None:
    new = path.with_suffix(".new")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
    new.replace(path)
