"""DeathCauses: whether a request may have brought about the end of a process, or somebody outside has.

Only the first kind counts against the requests that were there. Who is killed from outside gets SIGKILL or a
signal that asks for an end; the kernel sends SIGKILL too when memory is short, and counts how often it does,
for each cgroup: what it kills elsewhere on the machine is no concern of ours.
Everything else can be a request's doing: an exit with an error, a fault of memory or arithmetic, a hang.
"""

from __future__ import annotations

import signal
from pathlib import Path

ASKED_TO_END = frozenset({0, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP, -signal.SIGQUIT})
PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


class DeathCauses:
    def __init__(self, proc: Path = PROC, cgroups: Path = CGROUPS) -> None:
        """`proc`, `cgroups`: where the kernel shows processes and cgroups."""
        self._counters = _counters(proc, cgroups)
        self._num_oom_kills = self._read_oom_kills()

    def may_be_a_request(self, codes: list[int], *, hung: bool) -> bool:
        """`codes`: exit codes, or minus the signals, of the processes of a unit that had ended when that was
        seen; if one was killed from outside, the others may have ended because of that. `hung`: the launcher
        itself has killed one whose work loop stood still.
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
