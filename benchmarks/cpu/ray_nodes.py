"""Cost of having Ray place the agents: `python -m benchmarks.cpu.ray_nodes`, with the extra `ray`.

Two raylets at loopback addresses of this machine, and two launches of the demo model with a rank on each of
two nodes: one by `--executor ray`, one whose agent is started by hand. Printed are, in turns and as medians,
tokens per second of one stream and the CPU time that a step takes of scheduler, ranks, agent and launcher;
the share of a core that idle ranks and agents take; how many tasks Ray has heard of in 1,000 steps; and the
time from the command to ready. Of that with Ray, Ray's own part is what connecting, a group and an actor
take without us; the rest beyond the other launch's time is ours.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from benchmarks.process_cpu import cpu_of
from benchmarks.server import LAUNCHER, Server, launched
from carousel import Client, SamplingParams

HOST, OTHER = "127.0.0.2", "127.0.0.3"
BOTH = (
    *("--device", "cpu", "--nnodes", "2", "--tp-size", "2", "--cpu-threads", "1", "--no-http"),
    *("--max-total-tokens", "4096"),
)
TIMEOUT_S = 300.0
TOLD_S = 3.0
"""Seconds after which Ray has reported all tasks. It reports them every second."""
NUM_TRACED = 1000
NUM_CALLS = 5


@contextmanager
def raylets() -> Iterator[str]:
    """Context manager for two raylets, of which only the second has room for an agent."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    args = {"num_cpus": 1, "node_ip_address": HOST, "include_dashboard": False}
    made = import_module("ray.cluster_utils").Cluster(initialize_head=True, head_node_args=args)
    try:
        made.add_node(num_cpus=1, node_ip_address=OTHER)
        os.environ["RAY_ADDRESS"] = made.address
        yield made.address
    finally:
        made.shutdown()


def free_port() -> int:
    """Return a free port below those that the system assigns, with a few free ones after it."""
    while True:
        port = random.randrange(20000, 32000)
        try:
            for number in range(port, port + 6):
                with socket.socket() as listener:
                    listener.bind((HOST, number))
        except OSError:
            continue
        return port


@contextmanager
def by_ray() -> Iterator[Server]:
    with launched(*BOTH, "--executor", "ray", "--dist-addr", f"{HOST}:{free_port()}") as server:
        yield server


@contextmanager
def by_hand() -> Iterator[Server]:
    """Context manager for a launch whose two nodes are started at the same time by hand."""
    where = ("--dist-addr", f"{HOST}:{free_port()}")
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        command = [sys.executable, str(LAUNCHER), *BOTH, *where, "--node-rank", "1", "--node-addr", OTHER]
        command += ["--run-dir", f"{folder}/run"]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as agent:
            try:
                with launched(*BOTH, *where) as server:
                    yield server
            finally:
                agent.terminate()


def processes_of(server: Server) -> dict[str, int]:
    """Return the processes that a step or an idle launch uses, by name."""
    state = json.loads((server.run_dir / "state.json").read_bytes())
    pids = {f"{child['role']} {child['index']}": child["pid"] for child in state["children"]}
    agent = int(Path(f"/proc/{pids['worker 1']}/status").read_text().split("PPid:")[1].split()[0])
    return {
        "launcher": server.launcher_pid,
        "scheduler": pids["scheduler 0"],
        "rank 0": pids["worker 0"],
        "rank 1": pids["worker 1"],
        "agent": agent,
    }


def cpu_s(pids: dict[str, int]) -> dict[str, float]:
    return {name: cpu_of(pid) for name, pid in pids.items()}


def decode(client: Client, num_tokens: int) -> float:
    """Return the tokens per second of one stream."""
    asked = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0)
    began = time.monotonic()
    client.generate("def f(x):\n", asked, timeout=TIMEOUT_S)
    return num_tokens / (time.monotonic() - began)


def step_rates(launches: dict[str, Server], given: argparse.Namespace) -> dict[str, Any]:
    """Return the rates of both launches, in turns, and the CPU time of a step."""
    rates: dict[str, list[float]] = {name: [] for name in launches}
    used: dict[str, list[float]] = {name: [] for name in launches}
    pids = {name: processes_of(server) for name, server in launches.items()}
    clients = {name: Client(server.run_dir) for name, server in launches.items()}
    try:
        for client in clients.values():
            decode(client, given.tokens)
        for number in range(given.rounds):
            for name in list(clients)[:: 1 if number % 2 else -1]:
                before = sum(cpu_s(pids[name]).values())
                rates[name].append(decode(clients[name], given.tokens))
                used[name].append(1e6 * (sum(cpu_s(pids[name]).values()) - before) / given.tokens)
    finally:
        for client in clients.values():
            client.close()
    return {
        "tokens/s": {name: round(statistics.median(each)) for name, each in rates.items()},
        "rate, ray to hand": median_ratio(rates["ray"], rates["hand"]),
        "CPU us a step": {name: round(statistics.median(each)) for name, each in used.items()},
        "CPU, ray to hand": median_ratio(used["ray"], used["hand"]),
    }


def median_ratio(values: list[float], others: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(values, others, strict=True)), 3)


def idle_shares(launches: dict[str, Server], seconds: float) -> dict[str, dict[str, float]]:
    """Return the share of a core that each process takes while there are no requests."""
    pids = {name: processes_of(server) for name, server in launches.items()}
    before = {name: cpu_s(each) for name, each in pids.items()}
    time.sleep(seconds)
    return {
        name: {who: round((cpu_of(pid) - before[name][who]) / seconds, 4) for who, pid in each.items()}
        for name, each in pids.items()
    }


def tasks_traced(address: str, server: Server) -> dict[str, int]:
    """Return the number of tasks and actor calls that Ray has recorded in 1,000 steps and, as a control, in
    as many calls made here.
    """
    ray: Any = import_module("ray")
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")

    def num_tasks() -> int:
        time.sleep(TOLD_S)
        return len({event["args"]["task_id"] for event in ray.timeline() if "task_id" in event["args"]})

    try:
        before = num_tasks()
        with Client(server.run_dir) as client:
            first = client.collective_rpc("ping", timeout=TIMEOUT_S)[1]["num_steps"]
            for _ in range(2):
                decode(client, NUM_TRACED // 2 + 1)
            steps = client.collective_rpc("ping", timeout=TIMEOUT_S)[1]["num_steps"] - first
        after = num_tasks()

        def nothing() -> None:
            """Do nothing, in another process."""

        away = ray.remote(num_cpus=0)(nothing)
        ray.get([away.remote() for _ in range(NUM_CALLS)])
        return {"steps": steps, "in them": after - before, "in 5 calls": num_tasks() - after}
    finally:
        ray.shutdown()


def ray_alone() -> None:
    """Do what Ray does for a launch, without a launch: connect, wait for a group, and for an actor in it."""
    ray: Any = import_module("ray")
    util = import_module("ray.util")
    strategies = import_module("ray.util.scheduling_strategies")
    ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    group = util.placement_group([{"CPU": 1}] * 2, strategy="STRICT_SPREAD")
    assert group.wait(TIMEOUT_S)
    strategy = strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=1)

    class Nothing:
        def there(self) -> bool:
            return True

    actor = ray.remote(Nothing).options(num_cpus=1, scheduling_strategy=strategy).remote()
    ray.get(actor.there.remote(), timeout=TIMEOUT_S)
    print("there", flush=True)
    sys.stdin.read()
    util.remove_placement_group(group)


def start_of_ray_alone() -> float:
    command = (sys.executable, __file__, "--alone")
    began = time.monotonic()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        while (line := process.stdout.readline()) != b"there\n":
            assert line, "Ray has not placed an actor"
        seconds = time.monotonic() - began
        process.stdin.close()
    return seconds


def start_times(rounds: int) -> dict[str, Any]:
    """Return the medians of the start times, in turns, and of our part of the one with Ray."""
    times: dict[str, list[float]] = {"ray": [], "hand": [], "ray alone": []}
    for _ in range(rounds):
        for name, launch in (("ray", by_ray), ("hand", by_hand)):
            began = time.monotonic()
            with launch():
                times[name].append(time.monotonic() - began)
        times["ray alone"].append(start_of_ray_alone())
    ours = [a - b - c for a, b, c in zip(*times.values(), strict=True)]
    return {
        "start s": {name: round(statistics.median(each), 2) for name, each in times.items()},
        "our part of the start, s": round(statistics.median(ours), 2),
        "of each round": [round(each, 2) for each in ours],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="of a stream of each launch")
    parser.add_argument("--tokens", type=int, default=500, help="of each stream")
    parser.add_argument("--starts", type=int, default=5, help="of each kind")
    parser.add_argument("--idle-seconds", type=float, default=10.0)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.alone:
        ray_alone()
        return
    with raylets() as address:
        found = start_times(given.starts)
        print(found, flush=True)
        with by_ray() as ray, by_hand() as hand:
            launches = {"ray": ray, "hand": hand}
            found["idle, share of a core"] = idle_shares(launches, given.idle_seconds)
            found |= step_rates(launches, given)
            print(found, flush=True)
            found["Ray's tasks"] = tasks_traced(address, ray)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
