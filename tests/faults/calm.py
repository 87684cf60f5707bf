"""Calm: `python -m tests.faults.calm --minutes 30 [--load]`. A launch that nobody hurts, idle or under full
load: no process may be replaced, and /ready must say 200 whenever it is asked. Prints a report; exits with 1
otherwise.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from tests.faults.launch import FaultyLaunch, faulty_launch
from tests.faults.load import Load

LOOK_S = 0.1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.calm", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--load", action="store_true", help="64 streams and 16 plain calls all the time")
    arguments = parser.parse_args()
    with faulty_launch() as faulty:
        run_dir, url = faulty.launch.run_dir, faulty.launch.url
        load = (
            Load(run_dir, url, num_streams=48, num_http=16, num_plain=16) if arguments.load else nullcontext()
        )
        with load:
            pids, began = faulty.launch.pids(), time.monotonic()
            looks = watch(faulty, 60.0 * arguments.minutes)
            report: dict[str, Any] = {
                "minutes": round((time.monotonic() - began) / 60.0, 1),
                "looks": looks.num,
                "slowest_look_s": round(looks.slowest_s, 3),
                "flips": looks.flips[:20],
                "replaced": faulty.launch.pids() != pids,
            }
        faulty.check_accounts()
    if isinstance(load, Load):
        account = load.account
        report |= {"done": account.num_done, "failed": account.failed[:20], "wrong": account.wrong[:20]}
    print(json.dumps(report, indent=1))
    return int(any(report.get(name) for name in ("flips", "replaced", "failed", "wrong")))


@dataclass(slots=True)
class Looks:
    """At /ready."""

    num: int = 0
    slowest_s: float = 0.0
    flips: list[str] = field(default_factory=list)
    """Answers that were not 200."""


def watch(faulty: FaultyLaunch, seconds: float, looks: Looks | None = None, after: str = "start") -> Looks:
    """Ask all the time, for so long. after: what was before it, for who reads of a flip."""
    looks = looks or Looks()
    began = time.monotonic()
    while (now := time.monotonic()) - began < seconds:
        status, role = faulty.ready()
        looks.slowest_s = max(looks.slowest_s, time.monotonic() - now)
        looks.num += 1
        if status != 200:
            looks.flips.append(f"{status} {role}, {now - began:.1f} s after {after}")
        time.sleep(LOOK_S)
    return looks


if __name__ == "__main__":
    sys.exit(main())
