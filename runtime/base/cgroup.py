"""Limits of the control groups that this process is in: how much of the memory and of the cores it may have.

A container sees its own group as the root of the tree. A job of Slurm or a unit of systemd sees the whole
tree and is further below; each group above it has limits, too, and the least of them counts. Both versions
of control groups are read.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

T = TypeVar("T")

CGROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
NO_LIMIT = 1 << 62
"""Number of bytes from which on a limit counts as none. Version 1 of control groups has a larger number where
there is no limit.
"""
CACHE = frozenset({"active_file", "inactive_file"})
"""Lines of a group's statistics for files that the kernel keeps in memory until a process needs the room."""


class _Memory(NamedTuple):
    """Files of one version of control groups: a group's limit, and what it uses. `prefix`: beginning of the
    names of statistics that are of the groups below, too.
    """

    limit: str
    used: str
    prefix: str = ""


VERSIONS = (
    _Memory("memory.max", "memory.current"),
    _Memory("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)


def num_cores() -> int:
    """Return how many cores this process may keep busy: those that it may run on, or fewer if its control
    groups have less time.
    """
    return max(1, math.ceil(min([len(os.sched_getaffinity(0)), *_shares()])))


def memory_limit() -> int:
    """Return the bytes of memory that this process may have with its control groups; NO_LIMIT: any."""
    return min([NO_LIMIT, *(limit for limit, _ in _memory())])


def memory_left() -> int:
    """Return the bytes of memory that are left of that limit; NO_LIMIT: any."""
    return max(0, min([NO_LIMIT, *(limit - used for limit, used in _memory())]))


def _memory() -> Iterator[tuple[int, int]]:
    """Yield (limit, bytes in use that the kernel cannot take back) for each group with a limit."""
    for group in _groups("memory"):
        for version in VERSIONS:
            limit = _read(group / version.limit, int)
            if limit is not None and limit < NO_LIMIT:
                used = _read(group / version.used, int) or 0
                statistics = _read(group / "memory.stat", _numbers) or {}
                yield limit, used - sum(statistics.get(version.prefix + name, 0) for name in CACHE)


def _shares() -> Iterator[float]:
    """Yield the number of cores that its time is worth for each group with a limit."""
    for group in _groups("cpu"):
        said = _read(group / "cpu.max", str)
        if said is None:
            said = " ".join(_read(group / f"cpu.cfs_{name}_us", str) or "" for name in ("quota", "period"))
        quota, _, period = said.partition(" ")
        if quota.isdecimal() and period.isdecimal():  # neither max nor -1
            yield int(quota) / int(period)


def _groups(controller: str) -> Iterator[Path]:
    """Return the groups of this process with this controller, its own first and the root last."""
    lines = (_read(OWN_GROUPS, str) or "").splitlines()
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if controllers and controller not in controllers.split(","):
            continue
        root = CGROUPS / controller if controllers else CGROUPS
        group = root / path.lstrip("/")
        yield from (each for each in (group, *group.parents) if each.is_relative_to(root))


def _numbers(text: str) -> dict[str, int]:
    """Return the numbers of a file by their names."""
    return {name: int(number) for name, number in (line.split() for line in text.splitlines())}


def _read(path: Path, kind: Callable[[str], T]) -> T | None:
    """Return the content of a file; None if there is none, or its content is of another kind, such as max."""
    try:
        return kind(path.read_text().strip())
    except (OSError, ValueError):
        return None
