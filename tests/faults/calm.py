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
            report = watch(faulty, 60.0 * arguments.minutes)
        faulty.check_accounts()
    if isinstance(load, Load):
        account = load.account
        report |= {"done": account.num_done, "failed": account.failed[:20], "wrong": account.wrong[:20]}
    print(json.dumps(report, indent=1))
    return int(any(report.get(name) for name in ("flips", "replaced", "failed", "wrong")))


def watch(faulty: FaultyLaunch, seconds: float) -> dict[str, Any]:
    """What /ready has said that is not 200, and who was replaced, in so many seconds."""
    pids = faulty.launch.pids()
    began = time.monotonic()
    flips: list[tuple[float, int, str]] = []
    num_looks, slowest_s = 0, 0.0
    while (now := time.monotonic()) - began < seconds:
        status, role = faulty.ready()
        slowest_s = max(slowest_s, time.monotonic() - now)
        num_looks += 1
        if status != 200:
            flips.append((round(now - began, 1), status, role))
        time.sleep(LOOK_S)
    return {
        "minutes": round((time.monotonic() - began) / 60.0, 1),
        "looks": num_looks,
        "slowest_look_s": round(slowest_s, 3),
        "flips": flips[:20],
        "replaced": faulty.launch.pids() != pids or faulty.events("restart") + faulty.events("hang"),
    }


if __name__ == "__main__":
    sys.exit(main())
