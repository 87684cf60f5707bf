"""The long form: `python -m tests.faults.soak --minutes 60`, or `make soak`. Prints a report; exits with 1
when a request failed, a text differed, or something was left behind.

64 streams and 16 plain calls run all the time, their texts known beforehand. Beside them callers leave in the
middle, others come in bursts, and others send nonsense (`tests/faults/crowd.py`). At random moments a process
is killed, or stopped for good, or stopped for a moment; the HTTP server is left alone, because its callers'
connections end with it. What one process holds, memory and descriptors, must not grow.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from collections import defaultdict
from typing import Any, NamedTuple

from tests.faults.crowd import Crowd
from tests.faults.launch import ENGINE, FaultyLaunch, faulty_launch, still_same
from tests.faults.load import Load
from tests.launched import leftovers
from tests.resources import memory_mb, num_descriptors

BEHIND = ("tokenizer", "detokenizer", "scheduler", "worker")
MOMENT_S = 2.0
MIN_LOOKS = 8
"""At a process, before anything is said of its growth."""
MAX_GROWTH_MB = 32
MAX_MORE_DESCRIPTORS = 96
"""Connections of a burst and of those who leave come and go."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--faults", type=int, default=1 << 30, help="end after so many, whatever the time")
    parser.add_argument(
        "--kinds", nargs="+", default=["kill", "stop", "moment"], choices=["kill", "stop", "moment"]
    )
    parser.add_argument("--roles", nargs="+", default=list(BEHIND), choices=BEHIND)
    parser.add_argument(
        "--pause",
        type=float,
        default=5.0,
        help="seconds between a recovery and the next fault, at least; at random up to twice as long",
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("launch", nargs="*", help="further arguments of launch.py, after --")
    arguments = parser.parse_args()
    report = soak(arguments)
    print(json.dumps(report, indent=1))
    return int(any(report[name] for name in ("failed", "wrong", "left_behind", "crowd_wrong", "grown")))


def soak(arguments: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(arguments.seed)
    measured: defaultdict[str, list[dict[str, float]]] = defaultdict(list)
    held: list[dict[int, Held]] = []
    with faulty_launch(*arguments.launch) as faulty:
        run_dir = faulty.launch.run_dir
        end = time.monotonic() + 60.0 * arguments.minutes
        with (
            Load(run_dir, faulty.launch.url, num_streams=48, num_http=16, num_plain=16) as load,
            Crowd(run_dir, faulty.launch.url, arguments.seed) as crowd,
        ):
            num_faults = 0
            while time.monotonic() < end and num_faults < arguments.faults:
                time.sleep(arguments.pause * (1.0 + rng.random()))
                load.reset_gap()
                held.append(_resources(faulty))
                kind, role = rng.choice(arguments.kinds), rng.choice(arguments.roles)
                times = _hurt(faulty, kind, role)
                time.sleep(1.0)
                measured[f"{kind} {role}"].append({**times, "gap_s": round(load.reset_gap(), 2)})
                num_faults += 1
            held.append(_resources(faulty))
        faulty.check_accounts()
        loads = [event["seconds"] for event in faulty.events("ready") if event["process"] == "worker"]
        assert faulty.launch.stop() == 0, faulty.launch.log()
        left = sorted(leftovers(run_dir))
    account = load.account
    return {
        "done": account.num_done,
        "failed": account.failed[:20],
        "wrong": account.wrong[:20],
        "left_behind": left,
        "worst": {
            name: {"times": len(each), **{key: max(one[key] for one in each) for key in each[0]}}
            for name, each in sorted(measured.items())
        },
        "worker_load_s": {"least": min(loads), "most": max(loads)},
        "crowd": dict(crowd.outcomes),
        "crowd_wrong": crowd.wrong[:20],
        "grown": _grown(held),
        "resources": [{each.role: each[1:] for each in held[at].values()} for at in (0, len(held) // 2, -1)],
    }


def _hurt(faulty: FaultyLaunch, kind: str, role: str) -> dict[str, float]:
    """Do it and wait until all is well. Seconds until another process was ready, and until /ready said so."""
    before = faulty.launch.pids()
    began = time.monotonic()
    if kind == "moment":
        pid = faulty.kill(role, signal.SIGSTOP)
        time.sleep(MOMENT_S)
        os.kill(pid, signal.SIGCONT)
        assert still_same(faulty, before, 4.0), f"{role} was restarted for a moment's stop"
        return {"ready_s": round(faulty.wait_ready(), 2)}
    pid = faulty.kill(role, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    for each in ENGINE if role in ENGINE else (role,):
        faulty.wait_replaced(each, pid)
    replaced_s = time.monotonic() - began
    faulty.wait_ready()
    return {"replaced_s": round(replaced_s, 2), "ready_s": round(time.monotonic() - began, 2)}


class Held(NamedTuple):
    """Of one process."""

    role: str
    memory_mb: int
    num_descriptors: int


def _resources(faulty: FaultyLaunch) -> dict[int, Held]:
    """By process id."""
    state = faulty.launch.state()
    roles = {state["pid"]: "launcher"} | {child["pid"]: child["role"] for child in state["children"]}
    memory, descriptors = memory_mb(roles), num_descriptors(roles)
    return {pid: Held(roles[pid], mb, descriptors[pid]) for pid, mb in memory.items() if pid in descriptors}


def _grown(held: list[dict[int, Held]]) -> list[str]:
    """Processes that hold more at the end than when they were warm: at a quarter of the looks at them."""
    grown: list[str] = []
    looks: defaultdict[int, list[Held]] = defaultdict(list)
    for look in held:
        for pid, each in look.items():
            looks[pid].append(each)
    for each in looks.values():
        warm, last = each[len(each) // 4], each[-1]
        if len(each) >= MIN_LOOKS and last.memory_mb > warm.memory_mb + MAX_GROWTH_MB:
            grown.append(f"{last.role}: {warm.memory_mb} to {last.memory_mb} MB in {len(each)} looks")
        if len(each) >= MIN_LOOKS and last.num_descriptors > warm.num_descriptors + MAX_MORE_DESCRIPTORS:
            grown.append(f"{last.role}: {warm.num_descriptors} to {last.num_descriptors} descriptors")
    return grown


if __name__ == "__main__":
    sys.exit(main())
