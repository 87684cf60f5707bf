"""CPU time of processes by title, and memory of process trees, from /proc. CPU time has the resolution of a
scheduler tick, usually 10 ms.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
TITLE_PREFIX = "carousel:"


class _Stat(NamedTuple):
    parent: int
    cpu_s: float
    """User and system time of all threads that it has or had, in seconds."""


def children_of(pid: int) -> list[int]:
    return [child for child, stat in _all_processes().items() if stat.parent == pid]


def cpu_by_role(root: int) -> dict[str, float]:
    """Return the CPU seconds of each role of a runtime so far. root: pid of its launcher."""
    processes = _all_processes()
    found: defaultdict[str, float] = defaultdict(float)
    for pid, stat in processes.items():
        if root in (pid, stat.parent):
            found[role_of(pid)] += stat.cpu_s
    return found


def cpu_of(pid: int) -> float:
    """Return the CPU seconds of a process without its children."""
    return _all_processes()[pid].cpu_s


def tree_cpu(root: int) -> float:
    """Return the CPU seconds of `root` and all living processes below it."""
    processes = _all_processes()
    return sum(processes[pid].cpu_s for pid in _tree(root, processes))


def tree_pids(root: int) -> list[int]:
    """Return the pids of `root` and all processes below it."""
    return _tree(root, _all_processes())


def pss_bytes(root: int) -> int:
    """Return the memory of `root` and all processes below it; each shared page is divided among those that
    share it.
    """
    return sum(map(_pss_bytes, _tree(root, _all_processes())))


def role_of(pid: int) -> str:
    """Return the role of a runtime's process."""
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode().strip()
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    return title.removeprefix(TITLE_PREFIX) if title.startswith(TITLE_PREFIX) else "other"


def machine_busy() -> float:
    """Return the seconds that all CPUs together have worked since the machine's start."""
    with Path("/proc/stat").open() as file:
        user, nice, system, _, _, irq, soft_irq = map(int, file.readline().split()[1:8])
    return (user + nice + system + irq + soft_irq) / TICKS_PER_S


def _all_processes() -> dict[int, _Stat]:
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                # Fields after the name, which is in parentheses and may contain any character.
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            found[int(folder.name)] = _Stat(int(fields[1]), (int(fields[11]) + int(fields[12])) / TICKS_PER_S)
    return found


def _tree(root: int, processes: dict[int, _Stat]) -> list[int]:
    tree = [root] if root in processes else []
    for parent in tree:
        tree.extend(pid for pid, stat in processes.items() if stat.parent == parent)
    return tree


def _pss_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
