"""RayNodes: agents that Ray places on its machines, in one placement group with a bundle for each node. This
is the launcher's side.

Ray is imported in a separate process (`runtime.launcher.nodes.ray_placer`), so no Ray thread runs in the
launcher or in a rank, and no step calls Ray. The launcher writes orders to that process's standard input;
closing it ends the agents.
"""

from __future__ import annotations

import logging
import os
import select
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from runtime.base.errors import ConfigError
from runtime.launcher.nodes.node_settings import is_loopback
from runtime.settings.config import RuntimeConfig
from runtime.settings.engine_settings import SchedulerSettings
from runtime.settings.model_settings import NodeSettings

logger = logging.getLogger(__name__)

CLOSE_S = 10.0
AGAIN_S = 2.0
PLACER = (sys.executable, "-m", "runtime.launcher.nodes.ray_placer")
CONNECT_S = 60.0
"""Seconds for Ray to connect and to give up, in addition to the time that a group may wait for its machines.
"""


class Placement(msgspec.Struct, frozen=True):
    """A placement group to be created."""

    num_nodes: int
    cpus: int
    """Number of CPUs in each bundle."""
    words: list[str]
    """Command line of an agent, without its node number and address."""
    is_loopback: bool
    timeout_s: float


class PlacementAnswer(msgspec.Struct, frozen=True):
    """Answer to a Placement: the agents' addresses, or an error."""

    error: str = ""
    addresses: list[str] = []


class RayNodes:
    """Agents on Ray's machines, while this object is open. They end with the process that talks to Ray; a new
    process then places them again.
    """

    def __init__(
        self,
        asked: RuntimeConfig,
        config: RuntimeConfig,
        command: Sequence[str] = PLACER,
        again_s: float = AGAIN_S,
    ) -> None:
        """Place the agents, and wait until they are placed. asked: settings as given. config: settings as
        resolved on node 0. command: the process that talks to Ray. again_s: seconds between two attempts.
        Raises ConfigError with Ray's message.
        """
        self._placement = placement_of(asked, config)
        self._command, self._again_s = command, again_s
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        """Held while the process is being replaced."""
        self._process = self._start()
        try:
            self._place()
        except BaseException:
            self._end()
            self._let_go()
            raise
        self._keeper = threading.Thread(target=self._keep, name="ray-keeper", daemon=True)
        self._keeper.start()

    def __enter__(self) -> RayNodes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the placement group. Its agents end if node 0 has not ended them."""
        with self._lock:
            self._is_over.set()
        self._end()
        self._keeper.join()
        self._let_go()

    def _keep(self) -> None:
        """Replace the process until closed. If Ray has no machines, the launch ends by itself after the time
        that it waits for its nodes.
        """
        while True:
            code = self._process.wait()
            if self._is_over.is_set():
                return
            logger.warning("the process that asks Ray has ended (%d); agents are placed again", code)
            self._let_go()
            with self._lock:
                if self._is_over.is_set():
                    return
                self._process = self._start()
            try:
                self._place()
            except (ConfigError, OSError, ValueError) as error:  # ValueError: `close` has come before
                if not self._is_over.is_set():
                    logger.warning("%s", error)
                self._end()
                self._is_over.wait(self._again_s)

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the launcher only
        )

    def _place(self) -> None:
        """Send the placement to the process, and wait for the answer. Raises ConfigError, or OSError if the
        process has ended.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(self._placement) + b"\n")
        self._process.stdin.flush()
        placed = self._answer(self._placement.timeout_s + CONNECT_S)
        logger.info("Ray has placed agents at %s", ", ".join(placed.addresses))

    def _end(self) -> None:
        """End the process, which removes its placement group first."""
        process = self._process
        assert process.stdin is not None
        try:
            process.stdin.close()
            process.wait(CLOSE_S)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            process.kill()
            process.wait()

    def _let_go(self) -> None:
        """Close the pipes of a process that has ended."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def _answer(self, timeout_s: float) -> PlacementAnswer:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            how = "has ended without an answer" if ready else f"has not answered within {timeout_s:g} s"
            raise ConfigError(f"executor: the process that asks Ray {how}")
        placed = msgspec.json.decode(line, type=PlacementAnswer)
        if placed.error:
            raise ConfigError(f"executor: {placed.error}")
        return placed


def placement_of(asked: RuntimeConfig, config: RuntimeConfig) -> Placement:
    """Return the placement: one bundle for each node, and in each but node 0's an agent with the same engine
    settings. API keys and other settings of HTTP are not passed on.
    """
    default = RuntimeConfig()
    given: dict[str, Any] = {
        name: getattr(asked, name)
        for name in SchedulerSettings.__struct_fields__
        if getattr(asked, name) != getattr(default, name) and name not in NodeSettings.__annotations__
    }
    if given.get("model") and Path(given["model"]).exists():
        given["model"] = os.path.abspath(given["model"])
    host = config.dist_addr.rpartition(":")[0]
    given |= {"executor": "nodes", "nnodes": config.nnodes, "dist_addr": config.dist_addr}
    given |= {name: value for name in ("node_key", "trusted_network") if (value := getattr(asked, name))}
    if config.start_timeout != default.start_timeout:
        given["start_timeout"] = config.start_timeout
    return Placement(
        num_nodes=config.nnodes,
        cpus=max(1, config.cpu_threads) * config.ranks_per_node,
        words=[_word(name, value) for name, value in given.items()],
        is_loopback=is_loopback(host),
        timeout_s=config.start_timeout,
    )


def _word(name: str, value: Any) -> str:
    flag = f"--{name.replace('_', '-')}"
    if value is True:
        return flag
    text = (
        value if isinstance(value, str) else ",".join(map(str, value)) if isinstance(value, tuple) else value
    )
    return f"{flag}={text}"
