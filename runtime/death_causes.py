"""DeathCauses: whether a request may have brought about the end of a process, or somebody outside has.

Only the first kind counts against the requests that were there. Who is killed from outside gets SIGKILL or a
signal that asks for an end; the kernel sends SIGKILL too when memory is short, and counts how often it does.
Everything else can be a request's doing: an exit with an error, a fault of memory or arithmetic, a hang.
"""

from __future__ import annotations

import signal
from pathlib import Path

ASKED_TO_END = frozenset({0, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP, -signal.SIGQUIT})
VMSTAT = Path("/proc/vmstat")


class DeathCauses:
    def __init__(self, vmstat: Path = VMSTAT) -> None:
        self._vmstat = vmstat
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
        """Since the machine's start, of any process; 0 where the kernel does not say."""
        try:
            lines = self._vmstat.read_text().splitlines()
        except OSError:
            return 0
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
