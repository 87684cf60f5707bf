"""kill -9 of the launcher, again and again: `python -m tests.faults.launcher_deaths --cycles 200`. Prints a
report; exits with 1 when something was left behind or the next launch on the same port and directory failed.

Half of the launches are killed at a random moment of their start, a quarter while they serve streams, a
quarter while they end. The harness adopts orphans (PR_SET_CHILD_SUBREAPER), so none can hide: within a second
it has no child left, nobody listens on the port, and nothing is on disk.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import signal
import socket
import sys
import time
from collections import Counter
from functools import partial

from carousel import Client, SamplingParams
from tests.harness.ring.launched import Launched, free_ports, leftovers, wait_until

PR_SET_CHILD_SUBREAPER = 36
MOMENTS = ("start", "start", "serving", "end")
START_S = 6.0
"""A start takes about so long on a busy machine; kills are spread over it."""
END_S = 0.5
NUM_STREAMS = 4
GONE_S = 60.0
"""When to give up; what is asked for is PROMISED_S."""
PROMISED_S = 1.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.launcher_deaths", description=__doc__)
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    adopt_orphans()
    rng = random.Random(arguments.seed)
    port = free_ports(1)
    moments: Counter[str] = Counter()
    slowest_s, late, left = 0.0, list[str](), list[str]()
    for number in range(arguments.cycles):
        moment = MOMENTS[number % len(MOMENTS)]
        launch = Launched("--port", str(port))
        try:
            reached = kill(launch, moment, rng)
            gone_s = wait_until(partial(is_gone, launch, port), GONE_S, f"all of launch {number}")
        except TimeoutError:
            left.append(f"{number} {moment}: {sorted(leftovers(launch.run_dir))}, children {children()}")
            break
        finally:
            launch.close()
        moments[reached] += 1
        slowest_s = max(slowest_s, gone_s)
        if gone_s > PROMISED_S:
            late.append(f"{number} {reached}: {gone_s:.2f} s")
    with_next = Launched("--port", str(port))
    try:
        serve(with_next.wait_ready())
        exit_code = with_next.stop()
    finally:
        with_next.close()
    report = {
        "killed": dict(moments),
        "slowest_s": round(slowest_s, 2),
        "late": late,
        "left_behind": left,
        "exit_code_of_the_last": exit_code,
    }
    print(json.dumps(report, indent=1))
    return int(bool(late or left or exit_code))


def kill(launch: Launched, moment: str, rng: random.Random) -> str:
    """At a random time of `moment`; returns what the launch said of itself then."""
    if moment == "start":
        time.sleep(rng.random() * START_S)
        reached = str(launch.state().get("state", "nothing said"))
    else:
        launch.wait_ready()
        with Client(launch.run_dir) as client:
            long = SamplingParams(max_tokens=1000, ignore_eos=True)
            streams = [client.stream("Once", long) for _ in range(NUM_STREAMS)]
            for stream in streams:
                next(stream)
            if moment == "end":
                launch.process.send_signal(signal.SIGTERM)
                if rng.random() < 0.5:  # nobody waits for the streams
                    launch.process.send_signal(signal.SIGTERM)
                time.sleep(rng.random() * END_S)
            launch.process.kill()
        reached = moment
    launch.process.kill()
    launch.process.wait()
    return reached


def serve(launch: Launched) -> None:
    with Client(launch.run_dir) as client:
        assert client.generate("x", SamplingParams(max_tokens=4, ignore_eos=True)).finish_reason == "length"


def adopt_orphans() -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def is_gone(launch: Launched, port: int) -> bool:
    return not children() and not leftovers(launch.run_dir) and can_listen(port)


def children() -> list[str]:
    """Titles of the processes of a launch that are still there; what has ended is taken note of."""
    found: list[str] = []
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return []
        if pid == 0:
            break
    for path in (f"/proc/{pid}" for pid in os.listdir("/proc") if pid.isdigit()):
        try:
            with open(f"{path}/stat") as stat, open(f"{path}/cmdline") as title:
                if int(stat.read().rpartition(")")[2].split()[1]) == os.getpid():
                    found.append(title.read().replace("\0", " ").strip())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def can_listen(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
            listener.listen()
        except OSError:
            return False
    return True


if __name__ == "__main__":
    sys.exit(main())
