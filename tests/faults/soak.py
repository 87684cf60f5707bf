"""The long form: `python -m tests.faults.soak --minutes 60`, or `make soak`. Prints a report; exits with 1
when a request failed, a text differed, something was left behind, or /ready or the launcher found fault with
a launch that was left alone.

64 streams and 16 plain calls run all the time, their texts known beforehand. Beside them callers leave in the
middle, others come in bursts, and others send nonsense (`tests/faults/attacks/crowd.py`). At random moments a
process is killed, or stopped for good, or stopped for a moment; the HTTP server is left alone, because its
callers' connections end with it. What one process holds, memory and descriptors, must not grow.

`--each 20 --kinds kill --no-crowd`: so many of each kind at each role, in random order. `--roles worker:1 --
--tp-size 2`: one rank of a tensor-parallel engine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from runtime.ring.process import process_name
from tests.faults.attacks.crowd import Crowd
from tests.faults.calm import watch
from tests.faults.growth import Held, grown, resources
from tests.faults.launch import BEHIND, ENGINE, FaultyLaunch, faulty_launch, still_same
from tests.faults.load import Load
from tests.harness.ring.launched import leftovers, wait_until

KINDS = ("kill", "stop", "moment")
MOMENT_S = 2.0
NAMED_S = 15.0
SMALL_CACHE = "--max-total-tokens=16384"
"""Less than the load would have: requests are retracted all the time, and the cache's memory, which is taken
when a page is first written, has all been taken before growth is looked at.
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--each", type=int, default=0, help="end after so many of each kind at each role")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--roles", nargs="+", default=list(BEHIND), help="ROLE or ROLE:INDEX")
    parser.add_argument(
        "--pause",
        type=float,
        default=5.0,
        help="seconds between a recovery and the next fault, at least; at random up to twice as long",
    )
    parser.add_argument("--no-crowd", action="store_true", help="nobody but the streams and plain calls")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("launch", nargs="*", help="further arguments of launch.py, after --")
    arguments = parser.parse_args()
    report = soak(arguments)
    print(json.dumps(report, indent=1))
    bad = ("failed", "wrong", "left_behind", "false_alarms", "crowd_wrong", "grown")
    return int(any(report[name] for name in bad))


def soak(arguments: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(arguments.seed)
    measured: defaultdict[str, list[dict[str, float]]] = defaultdict(list)
    held: list[dict[int, Held]] = []
    with faulty_launch(SMALL_CACHE, *arguments.launch) as faulty:
        run_dir, url = faulty.launch.run_dir, faulty.launch.url
        end = time.monotonic() + 60.0 * arguments.minutes
        crowd = None if arguments.no_crowd else Crowd(run_dir, url, arguments.seed)
        with Load(run_dir, url, num_streams=48, num_http=16, num_plain=16) as load, crowd or nullcontext():
            looks = watch(faulty, arguments.pause)
            undisturbed_s = load.reset_gap()
            for kind, role in _faults(arguments, rng):
                held.append(resources(faulty))
                times = _hurt(faulty, kind, role)
                # A gap ends when text comes again, which may be later than the process.
                watch(faulty, arguments.pause * (1.0 + rng.random()), looks, f"{kind} {role}")
                times["gap_s"] = load.reset_gap()
                if "load_s" in times:
                    times["gap_beyond_load_s"] = times["gap_s"] - times["load_s"]
                measured[f"{kind} {role}"].append(times)
                if time.monotonic() >= end:
                    break
            held.append(resources(faulty))
        faulty.check_accounts()
        num_restarts = len(faulty.events("restart"))
        assert faulty.launch.stop() == 0, faulty.launch.log()
        left = sorted(leftovers(run_dir))
    account = load.account
    num_asked = sum(len(each) for name, each in measured.items() if not name.startswith("moment"))
    return {
        "done": account.num_done,
        "failed": account.failed[:20],
        "wrong": account.wrong[:20],
        "left_behind": left,
        "false_alarms": looks.flips[:20] + ["a restart too many"] * (num_restarts - num_asked),
        "quiet_looks": looks.num,
        "undisturbed_gap_s": round(undisturbed_s, 2),
        "faults": {name: _summary(each) for name, each in sorted(measured.items())},
        "crowd": dict(crowd.outcomes) if crowd else {},
        "crowd_wrong": crowd.wrong[:20] if crowd else [],
        "grown": grown(held),
        "resources": [{each.role: each[1:] for each in held[at].values()} for at in (0, len(held) // 2, -1)],
    }


def _faults(arguments: argparse.Namespace, rng: random.Random) -> Iterator[tuple[str, str]]:
    choices = list(itertools.product(arguments.kinds, arguments.roles))
    if arguments.each:
        yield from rng.sample(choices * arguments.each, len(choices) * arguments.each)
    else:
        yield from (rng.choice(choices) for _ in itertools.count())


def _summary(each: list[dict[str, float]]) -> dict[str, Any]:
    """Return median and worst of each figure."""
    return {"times": len(each)} | {
        key: [round(statistics.median(values), 2), round(max(values), 2)]
        for key in each[0]
        for values in [[one[key] for one in each]]
    }


def _hurt(faulty: FaultyLaunch, kind: str, role: str) -> dict[str, float]:
    """Do it and wait until all is well. Seconds until /ready named it, until another was ready, and so on."""
    role, _, number = role.partition(":")
    index = int(number or 0)
    before = faulty.launch.pids()
    began = time.monotonic()
    if kind == "moment":
        pid = faulty.kill(role, signal.SIGSTOP, index)
        time.sleep(MOMENT_S)
        os.kill(pid, signal.SIGCONT)
        assert still_same(faulty, before, 4.0), f"{role} was restarted for a moment's stop"
        return {"ready_s": faulty.wait_ready()}
    times: dict[str, float] = {}
    pid = faulty.kill(role, signal.SIGKILL if kind == "kill" else signal.SIGSTOP, index)
    if kind == "stop":
        name = process_name(role, index, faulty.config)
        wait_until(lambda: faulty.ready() == (503, name), NAMED_S, f"/ready names {name}")
        times["named_s"] = time.monotonic() - began
    for each in ENGINE if role in ENGINE else (role,):
        faulty.wait_replaced(each, pid, index if each == role else 0)
    times["replaced_s"] = time.monotonic() - began
    faulty.wait_ready()
    loads = [event["seconds"] for event in faulty.events("ready") if event["epoch"] == faulty.epoch]
    return {**times, "load_s": max(loads), "ready_s": time.monotonic() - began}


if __name__ == "__main__":
    sys.exit(main())
