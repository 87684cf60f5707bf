"""`python -m tests.faults.attacks.metered_launch ARGUMENT ...`: `launch.py` with the worker that sleeps and
an HTTP server that measures for how long its event loop is held in one piece.

The loop is the one that serves everybody (uvloop). Every PERIOD_S it notes the CPU time that its thread has
used since the last note: what a turn of the loop takes by itself, whatever else the machine does, and up to
PERIOD_S of the turns before it. A timer notes it, since a task would go on no sooner than in the turn after
the one in which its time has come.
"""

from __future__ import annotations

import asyncio
import mmap
import struct
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from carousel.server import main as api
from runtime.launcher import main as launcher
from runtime.launcher.hosts import local
from runtime.ring.endpoints import Endpoints
from runtime.ring.process import ProcessContext, run_process

PERIOD_S = 0.002
_FORMAT = struct.Struct("dd")


class Held(NamedTuple):
    """The longest time between two notes: of the loop's thread on a CPU, and by the clock."""

    cpu_s: float
    wall_s: float


def meter_file(run_dir: Path) -> Path:
    return run_dir / "loop_meter"


def take_held(run_dir: Path) -> Held:
    """Return the longest times since the last call, and begin anew."""
    with meter_file(run_dir).open("r+b") as file, mmap.mmap(file.fileno(), _FORMAT.size) as shown:
        held = Held(*_FORMAT.unpack(shown[:]))
        shown[:] = bytes(_FORMAT.size)
    return held


class Meter:
    """Notes of the event loop in which it is made."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_FORMAT.size))
        with path.open("r+b") as file:
            self._shown = mmap.mmap(file.fileno(), _FORMAT.size)
        self._loop = asyncio.get_running_loop()
        self._last = Held(time.thread_time(), time.monotonic())
        self._timer = self._loop.call_later(PERIOD_S, self._note)

    def close(self) -> None:
        self._timer.cancel()
        self._shown.close()

    def _note(self) -> None:
        now, last = Held(time.thread_time(), time.monotonic()), self._last
        before = Held(*_FORMAT.unpack(self._shown[:]))
        self._shown[:] = _FORMAT.pack(
            max(before.cpu_s, now.cpu_s - last.cpu_s), max(before.wall_s, now.wall_s - last.wall_s)
        )
        self._last = now
        self._timer = self._loop.call_later(PERIOD_S, self._note)


def main(context: ProcessContext) -> None:
    run = uvloop.run
    path = meter_file(Endpoints(context.endpoints.run_dir).run_dir)

    async def metered(serving: Any) -> None:
        meter = Meter(path)
        try:
            await serving
        finally:
            meter.close()

    def run_metered(serving: Any) -> None:
        run(metered(serving))

    setattr(uvloop, "run", run_metered)  # noqa: B010  (carousel.server.main calls it)
    api.main(context)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].startswith("-"):
        local.MODULES |= {
            "worker": "tests.harness.ring.sleeping_worker",
            "api": "tests.faults.attacks.metered_launch",
        }
        sys.exit(launcher.main(sys.argv[1:]))
    run_process("api", main)
