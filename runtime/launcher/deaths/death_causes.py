"""Judgement of process deaths: DeathCauses decides whether a request can have caused a death, and Deaths what
follows from it.

Only deaths that a request can have caused count against the requests that were there: an exit with an error,
a fault of memory or arithmetic, a hang. A process that is killed from outside gets SIGKILL or a signal that
asks it to end. The kernel also sends SIGKILL when memory is short. It counts these kills for each cgroup, so
kills elsewhere on the machine are not mistaken for ours.
"""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from runtime.launcher.deaths.engine_deaths import EngineDeaths, InHandDeaths
from runtime.launcher.deaths.restart_budget import RestartBudget, Verdict
from runtime.launcher.hosts.host import ENGINE, Child, ProcessPlace
from runtime.ring.endpoints import Endpoints
from runtime.wire.status_page import StatusPage

logger = logging.getLogger(__name__)

JUDGED_ROLES = ("tokenizer", "grammar", "detokenizer")
"""Roles outside of the engine whose processes show what they have in hand."""
ASKED_TO_END = frozenset({0, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP, -signal.SIGQUIT})
PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
LOOK_S = 1.0
"""Seconds between looks at the counter of out-of-memory kills."""
OUT_OF_MEMORY_S = 5.0
"""Seconds for which a kill for lack of memory may explain a death: a large process takes time to end."""


class DeathCauses:
    def __init__(
        self, proc: Path = PROC, cgroups: Path = CGROUPS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start counting out-of-memory kills from now on. proc, cgroups: mount points of the kernel's file
        systems.
        """
        self._counters = _counters(proc, cgroups)
        self._clock = clock
        self._num_oom_kills = self._read_oom_kills()
        self._looked_s = clock()
        self._killed_s = -math.inf
        """Time at which the last kill for lack of memory was seen that explains no death yet."""

    def look(self) -> None:
        """Note kills for lack of memory. Call it in every turn: the kill of a process outside the launch,
        such as a compiler, must not explain a later death.
        """
        now_s = self._clock()
        if now_s - self._looked_s >= LOOK_S:
            self._note_oom_kills(now_s)

    def may_be_a_request(self, codes: list[int], *, hung: bool) -> bool:
        """Return True if a request can have caused the end of a unit.

        codes: exit codes, or minus the signals, of its processes that had ended when this was noticed. If one
        was killed from outside, the others may have ended because of that. hung: the launcher has killed one
        whose work loop stood still.
        """
        if hung:
            return True
        if -signal.SIGKILL in codes:
            now_s = self._clock()
            self._note_oom_kills(now_s)
            out_of_memory = now_s - self._killed_s <= OUT_OF_MEMORY_S
            self._killed_s = -math.inf
            return out_of_memory
        return not any(code in ASKED_TO_END for code in codes)

    def _note_oom_kills(self, now_s: float) -> None:
        self._looked_s = now_s
        num_oom_kills = self._read_oom_kills()
        if num_oom_kills > self._num_oom_kills:
            self._killed_s = now_s
        self._num_oom_kills = num_oom_kills

    def _read_oom_kills(self) -> int:
        """Return the counter of the first file that has one; 0 if the kernel shows none."""
        return next((count for path in self._counters if (count := _oom_kills(path)) is not None), 0)


class Deaths:
    """Judges the deaths of a launch. It neither ends nor starts processes itself."""

    def __init__(self, endpoints: Endpoints, page: StatusPage, restart_window_s: float) -> None:
        """endpoints, page: of the launch. restart_window_s: as in RestartBudget."""
        self._page = page
        self._causes = DeathCauses()
        self._engine_deaths = EngineDeaths(endpoints)
        self._in_hand_deaths = {role: InHandDeaths(endpoints, role) for role in JUDGED_ROLES}
        self._budget = RestartBudget(restart_window_s)
        self._hung: set[Child] = set()
        """Processes that were killed because their work loops stood still."""

    @property
    def restarts(self) -> Mapping[str, int]:
        """Number of restarts since the launch, by unit."""
        return self._budget.counts

    def look(self) -> None:
        """Note kills that the kernel reports. Call it in every turn."""
        self._causes.look()

    def note_hang(self, child: Child) -> None:
        """Record that a process is killed because its work loop stands still."""
        self._hung.add(child)

    def may_be_a_request(self, unit: Sequence[Child], code: int) -> bool:
        """Return True if the processes of a unit ended by themselves, perhaps because of a request, and not
        from outside. code: exit code, or minus the signal, of the first one.
        """
        hung = not self._hung.isdisjoint(unit)
        self._hung.difference_update(unit)
        codes = [code, *(child.poll() for child in unit[1:])]
        return self._causes.may_be_a_request([each for each in codes if each is not None], hung=hung)

    def spend_restart(self, place: ProcessPlace, limit: int, *, by_itself: bool, was_ready: bool) -> float:
        """Return the seconds to wait before the unit of `place` is started again. Raises StartError.
        by_itself: result of `may_be_a_request`. Call it when no process of the unit lives that could change
        the roster.
        """
        now_s = time.monotonic()
        verdict = None
        if was_ready and by_itself:
            verdict = self._judge(place, now_s)
        elif was_ready:
            self.note_end(place)
        return self._budget.spend(
            place.unit, limit, now_s, from_outside=not by_itself, was_ready=was_ready, verdict=verdict
        )

    def note_end(self, place: ProcessPlace) -> None:
        """Record which requests came past earlier deaths in a process that was ready, and that no request has
        ended. Call it before its successor starts, which empties the file where the process has written this.
        """
        try:
            if place.unit == ENGINE:
                self._engine_deaths.note_end(time.monotonic())
            elif place.role in JUDGED_ROLES:
                self._in_hand_deaths[place.role].note_end(place.index, time.monotonic())
        except OSError as error:
            logger.warning("what came past earlier deaths in %s is not known: %s", place.unit, error)

    def _judge(self, place: ProcessPlace, now_s: float) -> Verdict | None:
        """Record the requests that a process held when it died, for its successor. Done by the caller and not
        in a thread: a process that read the file too early would take the guilty request again.
        """
        try:
            if place.unit == ENGINE:
                return self._engine_deaths.count(self._page.read("scheduler").solitary, now_s)
            if place.role in JUDGED_ROLES:
                return self._in_hand_deaths[place.role].count(place.index, now_s)
        except OSError as error:
            logger.warning("who was there when %s died is not counted: %s", place.unit, error)
        return None


def _counters(proc: Path, cgroups: Path) -> list[Path]:
    """Return the files that may count out-of-memory kills, best first: those of this process's cgroup, which
    its children share, in either version of cgroups; then that of the machine.
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
