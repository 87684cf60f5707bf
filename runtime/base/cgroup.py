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
"""Bytes above any limit; what the first version says where there is none is more."""
CACHE = frozenset({"active_file", "inactive_file"})
"""Lines of a group's statistics: files that the kernel keeps in memory until somebody needs the room."""


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
    """Return how many cores this process may keep busy: those that it may run on, or as many as the time that
    its control groups have makes.
    """
    return max(1, math.ceil(min([len(os.sched_getaffinity(0)), *_shares()])))


def memory_limit() -> int:
    """Return the bytes of memory that this process may have with its control groups; NO_LIMIT: any."""
    return min([NO_LIMIT, *(limit for limit, _ in _memory())])


def memory_left() -> int:
    """Return the bytes of memory that are left of that limit; NO_LIMIT: any."""
    return max(0, min([NO_LIMIT, *(limit - used for limit, used in _memory())]))


def _memory() -> Iterator[tuple[int, int]]:
    """Return, of each group that has a limit, that and how much of it is in use for good."""
    for group in _groups("memory"):
        for version in VERSIONS:
            limit = _read(group / version.limit, int)
            if limit is not None and limit < NO_LIMIT:
                used = _read(group / version.used, int) or 0
                statistics = _read(group / "memory.stat", _numbers) or {}
                yield limit, used - sum(statistics.get(version.prefix + name, 0) for name in CACHE)


def _shares() -> Iterator[float]:
    """Return the cores that a group's time makes, of each group that has a limit."""
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
    """The lines of a file of names and numbers."""
    return {name: int(number) for name, number in (line.split() for line in text.splitlines())}


def _read(path: Path, kind: Callable[[str], T]) -> T | None:
    """Return what a file says; None where there is none, or something else in it, such as max."""
    try:
        return kind(path.read_text().strip())
    except (OSError, ValueError):
        return None
