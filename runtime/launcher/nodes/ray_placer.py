"""Process that asks Ray for machines, started by a launcher as `python -m runtime.launcher.nodes.ray_placer`.

It reads a Placement from standard input, answers with a PlacementAnswer, and keeps the placement group until
the input closes. An actor in each bundle but the first, which reserves room for node 0, starts an agent and
starts it again when it dies. If the actor's machine is lost, Ray starts the actor elsewhere.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from runtime.base.errors import EXIT_CONFIG, EXIT_OK, ConfigError
from runtime.launcher.child import OOM_SCORE_FILE
from runtime.launcher.nodes.ray_nodes import Placement, PlacementAnswer

AGAIN_S = 1.0
NODE_SHARE = 0.001
"""Amount of the resource named after a machine's address; enough to pin a bundle to that machine."""
STARTED_S = 60.0


def take_niceness_of(raylet: int) -> None:
    """Give this thread, and so the agent and its ranks, the niceness of the raylet. Ray's workers have 15 by
    default, and a rank that yields to everything else on its machine delays all other ranks.
    """
    wanted = os.getpriority(os.PRIO_PROCESS, raylet)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, wanted)
    except PermissionError:
        own = os.getpriority(os.PRIO_PROCESS, 0)
        _say(
            f"the ranks run at niceness {own}, as Ray's workers do, and this user may not lower it; set "
            "RAY_worker_niceness=0 for `ray start`"
        )


def take_oom_score_of(raylet: int) -> None:
    """Give this process, and so the agent, the OOM score of the raylet; ranks add to it. Ray's workers have
    1,000 by default, so the kernel would kill the actor first when memory is short, and with it the agent.
    """
    wanted = Path(f"/proc/{raylet}/oom_score_adj").read_text()
    try:
        OOM_SCORE_FILE.write_text(wanted)
    except OSError:  # this user may not lower it, or /proc is read-only
        _say(
            f"the agent has the OOM score {OOM_SCORE_FILE.read_text().strip()} of Ray's workers, so the "
            "kernel ends it first when memory is short, and this user may not lower it; set "
            "RAY_worker_oom_score_adjustment=0 for `ray start`"
        )


def _say(line: str) -> None:
    print(line, file=sys.stderr)


class AgentActor:
    """Ray actor that runs an agent on the machine of its bundle while the launch exists."""

    def address(self) -> str:
        """Return this machine's address. The first call shows that the actor is running."""
        address: str = import_module("ray").util.get_node_ip_address()
        return address

    def run(self, words: list[str], is_loopback: bool) -> int:
        """Run the agent until the launch is over or refuses it. Returns the exit code. An agent that dies is
        started again. is_loopback: several "machines" are this one.
        """
        raylet = os.getppid()
        take_niceness_of(raylet)
        take_oom_score_of(raylet)
        tied = [sys.executable, "-m", "runtime.launcher.child", str(os.getpid()), "0"]
        if is_loopback:
            words = [*words, f"--node-addr={self.address()}"]
        while True:
            with tempfile.TemporaryDirectory(prefix="carousel-agent-") as folder:
                command = [*tied, "runtime.launcher.main", *words, f"--run-dir={os.path.join(folder, 'run')}"]
                code = subprocess.run(command, cwd=folder, check=False).returncode
            if code in (EXIT_OK, EXIT_CONFIG):
                return code
            time.sleep(AGAIN_S)


class Placer:
    def __init__(self, placement: Placement) -> None:
        """Connect to an existing Ray cluster; none is started. Raises ConfigError."""
        self._placement = placement
        self._group: Any = None
        try:
            self._ray = import_module("ray")
        except ImportError:
            raise ConfigError(
                "ray is not installed; pip install 'carousel[ray]', here and on each machine of the cluster"
            ) from None
        try:
            self._ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"ray: there is no cluster: {' '.join(str(error).split())}; start one with `ray start`, and "
                "set RAY_ADDRESS where it is not this machine's"
            ) from None

    def place(self) -> list[str]:
        """Create the group, start the agents, and return their addresses. Raises ConfigError."""
        asked, ray = self._placement, self._ray
        util = import_module("ray.util")
        strategies = import_module("ray.util.scheduling_strategies")
        here = util.get_node_ip_address()
        bundle = {"CPU": asked.cpus}
        bundles = [{**bundle, f"node:{here}": NODE_SHARE}, *[bundle] * (asked.num_nodes - 1)]
        self._group = util.placement_group(bundles, strategy="STRICT_SPREAD")
        if not self._group.wait(asked.timeout_s):
            raise ConfigError(self._missing(here))
        make = ray.remote(AgentActor).options
        actors = [
            make(
                num_cpus=asked.cpus,
                max_restarts=-1,
                max_task_retries=-1,
                max_concurrency=1,
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=number
                ),
            ).remote()
            for number in range(1, asked.num_nodes)
        ]
        try:
            addresses: list[str] = ray.get([actor.address.remote() for actor in actors], timeout=STARTED_S)
        except ray.exceptions.RayError as error:
            raise ConfigError(f"ray: the agents' actors do not start: {error}") from None
        # A reference that makes Ray keep the actors.
        self._running = [
            (actor, actor.run.remote(self._words(number), asked.is_loopback))
            for number, actor in enumerate(actors, start=1)
        ]
        return addresses

    def close(self) -> None:
        """Remove the group, with its actors and their agents."""
        if self._group is not None:
            import_module("ray.util").remove_placement_group(self._group)
        self._ray.shutdown()

    def _words(self, number: int) -> list[str]:
        return [*self._placement.words, f"--node-rank={number}"]

    def _missing(self, here: str) -> str:
        asked = self._placement
        alive = [node for node in self._ray.nodes() if node["Alive"]]
        large = [node for node in alive if node["Resources"].get("CPU", 0) >= asked.cpus]
        free = self._ray.available_resources().get("CPU", 0)
        return (
            f"ray: {asked.num_nodes} machines with {asked.cpus} CPUs each, {here} one of them, were not "
            f"to be had within {asked.timeout_s:g} s: the cluster has {len(alive)} machines, {len(large)} of "
            f"them with so many CPUs, and {free:g} CPUs are free in all; add machines, or lower --nnodes or "
            "--cpu-threads"
        )


def main() -> None:
    """Place, answer, and wait for the end of the standard input."""
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # Ray prints
    placement = msgspec.json.decode(sys.stdin.buffer.readline(), type=Placement)
    placer = None
    try:
        placer = Placer(placement)
        placed = PlacementAnswer(addresses=placer.place())
    except ConfigError as error:
        placed = PlacementAnswer(error=str(error))
    os.write(answers, msgspec.json.encode(placed) + b"\n")
    if not placed.error:
        sys.stdin.buffer.read()
    if placer is not None:
        placer.close()


if __name__ == "__main__":
    main()
