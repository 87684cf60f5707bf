"""StepProfile: profile of some steps of scheduler and worker, written as a Chrome trace for Perfetto
(ui.perfetto.dev).

While no profile is taken, `begin` and `mark` return at once, and plans do not ask the worker for its times.
While one is taken, the HTTP server, which `on_change` has told, samples all requests and adds them to the
file that it serves. Directory and file name are chosen by the launch. A request can choose neither, gets only
the name of the file, and cannot fill the disk, because only the last files are kept.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from runtime.base.errors import RequestError
from runtime.wire.messages import MAX_PROFILE_STEPS
from runtime.wire.plan import BatchPlan, StepResult
from scheduler_proc.port import Port

logger = logging.getLogger(__name__)

SCHEDULER, WORKER, STEPS = 1, 2, 3
"""Tracks of the trace (`tid`)."""
NUM_KEPT = 4
"""Maximum number of files of one scheduler process that are kept. A profile of the most steps has some
megabytes.
"""
MAX_EVENTS = 100_000
"""Maximum number of events of a profile, which has about eight for each step. Turns without a step, in which
the scheduler only receives messages, have three.
"""
TRACKS = {SCHEDULER: (1, "turns"), WORKER: (2, "worker"), STEPS: (1, "steps")}
"""Process (`pid`) and name of each track."""
PROCESSES = {1: "scheduler", 2: "worker"}


class StepProfile:
    """Profiler of steps, with at most one profile at a time. When it ends, by itself or on request, the file
    is written.
    """

    def __init__(self, directory: Path | None, port: Port) -> None:
        """directory: for the files; None: no profile can be taken here. port: for its stopwatch."""
        self.is_on = False
        self.on_change: Callable[[bool], None] = lambda is_on: None
        """Called with True when a profile begins and False when it ends."""
        self._directory = directory
        self._port = port
        self._events: list[dict[str, Any]] = []
        self._num_profiles = 0
        self._num_steps = 0
        self._steps_left = 0
        self._marked_ns = 0
        self._begun_ns = 0
        self._path = Path()
        self._kept: deque[Path] = deque()

    # -- asked for -------------------------------------------------------------------------------------------

    def start(self, num_steps: int) -> dict[str, str | int]:
        """Profile the next `num_steps` steps; 0: until `stop`, but at most MAX_PROFILE_STEPS. Raises
        RequestError with status 409 while a profile is taken, 400 without a directory, and 500 if no file can
        be created there.
        """
        if self.is_on:
            raise RequestError("a profile is being taken; stop it first", code="profile_running", status=409)
        if self._directory is None:
            raise RequestError("this scheduler has no directory for profiles", code="no_profile_dir")
        self._path = self._new_file(self._directory)
        self._events = [
            {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
            for pid, name in PROCESSES.items()
        ]
        self._events += [
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": track, "args": {"name": name}}
            for track, (pid, name) in TRACKS.items()
        ]
        self._begun_ns = self._marked_ns = self._port.stopwatch_ns()
        self._num_steps = 0
        self._steps_left = num_steps or MAX_PROFILE_STEPS
        self.is_on = True
        self.on_change(True)
        logger.info("profile: the next %d steps, at most, to %s", self._steps_left, self._path)
        return {"file": self._path.name, "num_steps": self._steps_left}

    def stop(self) -> dict[str, str | int]:
        """End the profile. Steps in flight are not in it. Raises RequestError with status 409 if none is
        taken, and 500 if the file cannot be written.
        """
        if not self.is_on:
            raise RequestError("no profile is being taken", code="no_profile", status=409)
        self.is_on = False
        self.on_change(False)
        window = {"begun_us": self._begun_ns / 1000, "ended_us": self._port.stopwatch_ns() / 1000}
        events, self._events = self._events, []
        # The events come last, so that the HTTP server can add its own without reading these.
        trace = {"displayTimeUnit": "ms", "otherData": window, "traceEvents": events}
        try:
            self._path.write_bytes(msgspec.json.encode(trace))
        except OSError as error:
            raise _lost(self._path, error) from error
        logger.info("profile: %d steps are in %s", self._num_steps, self._path)
        return {"file": self._path.name, "num_steps": self._num_steps}

    def _new_file(self, directory: Path) -> Path:
        """Make the file of a profile, empty, so that its name is no other's: several launches may have the
        same directory, and profiles that begin in the same second. Raises RequestError.
        """
        begun = datetime.fromtimestamp(self._port.wall_s())
        while True:
            self._num_profiles += 1
            path = directory / f"profile-{begun:%Y%m%d-%H%M%S}-{self._num_profiles}.json"
            try:
                path.open("xb").close()
            except FileExistsError:
                continue
            except OSError as error:
                raise _lost(path, error) from error
            self._kept.append(path)
            while len(self._kept) > NUM_KEPT:
                with contextlib.suppress(OSError):  # it is gone, or this process may not remove it
                    self._kept.popleft().unlink()
            return path

    # -- told by the step ------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Record the begin of a turn of the loop."""
        if self.is_on:
            self._marked_ns = self._port.stopwatch_ns()

    def mark(self, name: str, **about: int) -> None:
        """Record the scheduler's work since the last mark under a name."""
        if self.is_on:
            now = self._port.stopwatch_ns()
            self._add(SCHEDULER, name, self._marked_ns, now, about)
            self._marked_ns = now

    def with_profiling(self, plan: BatchPlan) -> BatchPlan:
        """Return the plan, or a copy that asks the worker for its times."""
        return msgspec.structs.replace(plan, profiled=True) if self.is_on else plan

    def note_result(self, result: StepResult) -> None:
        """Record a step that the worker has timed."""
        if not (result.spans and self.is_on):
            return
        for span in result.spans:
            self._add(WORKER, span.name, span.begin_ns, span.end_ns, {"step": result.step})
        self._num_steps += 1

    def note_step(self, step: int, begin_s: float, end_s: float) -> None:
        """Record a finished step with its begin and end, as /stats/iterations counts them."""
        if self.is_on:
            self._add(STEPS, "step", round(begin_s * 1e9), round(end_s * 1e9), {"step": step})

    def end_turn(self) -> None:
        """End the profile if it has all its steps, or as many events as it may have."""
        if self.is_on and (self._num_steps >= self._steps_left or len(self._events) >= MAX_EVENTS):
            with contextlib.suppress(RequestError):  # it is in the log
                self.stop()

    def _add(self, track: int, name: str, begin_ns: int, end_ns: int, about: dict[str, int]) -> None:
        event = {"ph": "X", "name": name, "pid": TRACKS[track][0], "tid": track, "args": about}
        self._events.append(event | {"ts": begin_ns / 1000, "dur": (end_ns - begin_ns) / 1000})


def _lost(path: Path, error: OSError) -> RequestError:
    logger.error("profile: %s cannot be written: %s", path, error)
    reason = error.strerror or type(error).__name__
    return RequestError(f"the profile cannot be written: {reason}", code="profile_lost", status=500)
