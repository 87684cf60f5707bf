"""The end of a launch in the middle of its work: `python -m tests.faults.drain [--times 5] [--sleeping]` ends
launches of the demo model, or of the worker that sleeps, under 16 streams: with one signal, with two, and
with less time than the streams take. Prints, in seconds, how long after the last stream, the second signal or
the deadline the launch had ended, and its exit codes; exits with 1 where one is wrong.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from contextlib import ExitStack
from typing import Any

from tests.faults.test_shutdown import MANY_STEPS, Caller
from tests.harness.ring.launched import Launched, launched, leftovers, wait_until

NUM_STREAMS = 16
NUM_TOKENS = 200
DEADLINE_S = 1.0
ENDS = {"drained": 0, "cut by a second signal": 75, "cut at the deadline": 75}
"""Exit codes by how a launch is ended."""


def end(launch: Launched, how: str) -> dict[str, float]:
    """End a launch under streams. Returns what it took, and its exit code."""
    length = NUM_TOKENS if how == "drained" else MANY_STEPS
    callers = [Caller(launch.url, length) for _ in range(NUM_STREAMS)]
    for caller in callers:
        caller.start()
    for caller in callers:
        assert caller.began.wait(60.0)
    ended_s: list[float] = []

    def wait() -> None:
        launch.process.wait()
        ended_s.append(time.monotonic())

    exited = threading.Thread(target=wait)
    exited.start()
    launch.process.send_signal(signal.SIGTERM)
    from_s = time.monotonic()
    if how == "drained":
        for caller in callers:
            caller.join(120.0)
        from_s = time.monotonic()
    elif how == "cut by a second signal":
        wait_until(lambda: launch.state().get("state") == "draining", 10.0, "the launch drains")
        launch.process.send_signal(signal.SIGTERM)
        from_s = time.monotonic()
    else:
        from_s += DEADLINE_S
    exited.join(120.0)
    for caller in callers:
        caller.join(60.0)
    num_whole = sum("data: [DONE]" in caller.lines for caller in callers)
    return {"seconds": ended_s[0] - from_s, "code": launch.process.wait(), "whole": num_whole}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.drain", description=__doc__)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--sleeping", action="store_true", help="the worker that sleeps instead of the model")
    arguments = parser.parse_args()
    module = "tests.harness.ring.sleeping_worker" if arguments.sleeping else "launch"
    report: dict[str, Any] = {}
    is_right = True
    for how, code in ENDS.items():
        times: list[float] = []
        for _ in range(arguments.times):
            settings = [f"--drain-timeout={DEADLINE_S}"] if how == "cut at the deadline" else []
            with ExitStack() as stack:
                launch = stack.enter_context(launched(*settings, module=module))
                found = end(launch, how)
                is_right &= found["code"] == code and not leftovers(launch.run_dir)
                is_right &= found["whole"] == (NUM_STREAMS if how == "drained" else 0)
                times.append(round(found["seconds"], 2))
        report[how] = {"median_s": sorted(times)[len(times) // 2], "most_s": max(times)}
    print(json.dumps({"worker": module, "right": is_right, **report}, indent=1))
    return int(not is_right)


if __name__ == "__main__":
    sys.exit(main())
