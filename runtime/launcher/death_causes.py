"""Deaths: what follows from the end of processes that nobody asked to end; DeathCauses: whether a request may
have brought it about, or somebody outside has.

Only the first kind counts against the requests that were there. Who is killed from outside gets SIGKILL or a
signal that asks for an end; the kernel sends SIGKILL too when memory is short, and counts how often it does,
for each cgroup: what it kills elsewhere on the machine is no concern of ours.
Everything else can be a request's doing: an exit with an error, a fault of memory or arithmetic, a hang.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from runtime.launcher.hosts.host import Child
from runtime.launcher.restart_budget import RestartBudget
from runtime.ring.endpoints import Endpoints
from runtime.ring.roster import EngineDeaths
from runtime.wire.status_page import StatusPage

logger = logging.getLogger(__name__)

ASKED_TO_END = frozenset({0, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP, -signal.SIGQUIT})
PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


class DeathCauses:
    def __init__(self, proc: Path = PROC, cgroups: Path = CGROUPS) -> None:
        """Count from here the kills for lack of memory. `proc`, `cgroups`: where the kernel shows processes
        and cgroups.
        """
        self._counters = _counters(proc, cgroups)
        self._num_oom_kills = self._read_oom_kills()

    def may_be_a_request(self, codes: list[int], *, hung: bool) -> bool:
        """Tell whether a request may have brought about the end of a unit. `codes`: exit codes, or minus the
        signals, of its processes that had ended when that was seen; if one was killed from outside, the
        others may have ended because of that. `hung`: the launcher itself has killed one whose work loop
        stood still.
        """
        num_oom_kills = self._read_oom_kills()
        out_of_memory = num_oom_kills > self._num_oom_kills
        self._num_oom_kills = num_oom_kills
        if hung or out_of_memory:
            return True
        return not any(code in ASKED_TO_END or code == -signal.SIGKILL for code in codes)

    def _read_oom_kills(self) -> int:
        """Return the count of the first file that tells; 0 where the kernel does not say."""
        return next((count for path in self._counters if (count := _oom_kills(path)) is not None), 0)


class Deaths:
    """Judge of the deaths of a launch. Ends and starts nothing itself."""

    def __init__(self, endpoints: Endpoints, page: StatusPage, restart_window_s: float) -> None:
        """endpoints, page: of the launch. restart_window_s: as RestartBudget's."""
        self._page = page
        self._causes = DeathCauses()
        self._engine_deaths = EngineDeaths(endpoints)
        self._budget = RestartBudget(restart_window_s)
        self._hung: set[Child] = set()
        """Processes that are killed because their work loops stand still."""

    @property
    def restarts(self) -> Mapping[str, int]:
        """Number of restarts since the launch, by unit."""
        return self._budget.counts

    def note_hang(self, child: Child) -> None:
        """Remember that a process is killed because its work loop stands still."""
        self._hung.add(child)

    def may_be_a_request(self, unit: Sequence[Child], code: int) -> bool:
        """Tell whether the processes of a unit have ended by themselves, perhaps because of a request, and
        not by somebody outside. `code`: how the first one did.
        """
        hung = not self._hung.isdisjoint(unit)
        self._hung.difference_update(unit)
        codes = [code, *(child.poll() for child in unit[1:])]
        return self._causes.may_be_a_request([each for each in codes if each is not None], hung=hung)

    def spend_restart(self, unit: str, limit: int, *, by_itself: bool, was_ready: bool) -> float | None:
        """Return the seconds to wait before `unit` is started again; None: it has had its `limit` restarts.
        by_itself: as `may_be_a_request` says.
        """
        return self._budget.spend(
            unit, limit, time.monotonic(), from_outside=not by_itself, was_ready=was_ready
        )

    def count_engine(self) -> None:
        """Note which sequences were there when the engine died, for the one that takes its place. Written by
        the caller and not by a thread: an engine that read the file too early would run again what has ended
        the one before.
        """
        try:
            self._engine_deaths.count(self._page.read("scheduler").solitary)
        except OSError as error:
            logger.warning("who was there when the engine died is not counted: %s", error)


def _counters(proc: Path, cgroups: Path) -> list[Path]:
    """Files that may count kills for lack of memory, best first: of this process's cgroup, which its children
    share, in either version of cgroups; of the machine.
    """
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    groups = [line.split(":", 2)[1:] for line in lines]
    files = [
        cgroups / "memory" / path.lstrip("/") / "memory.oom_control"
        for controllers, path in groups
        if "memory" in controllers.split(",")
    ]
    files += [cgroups / path.lstrip("/") / "memory.events" for controllers, path in groups if not controllers]
    return [*files, proc / "vmstat"]


def _oom_kills(path: Path) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
