"""Growth of what the processes of a launch hold."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from tests.faults.launch import FaultyLaunch
from tests.harness.ring.resources import memory_mb, num_descriptors

MIN_LOOKS = 8
"""At a process, before anything is said of its growth."""
MAX_GROWTH_MB = 48
"""Megabytes by which a process may grow. A tokenizer that took another's place imports 36 of them for its
first conversation.
"""
MAX_MORE_DESCRIPTORS = 96
"""Connections of a burst and of those who leave come and go."""


class Held(NamedTuple):
    """Resources that one process holds."""

    role: str
    memory_mb: int
    num_descriptors: int


def resources(faulty: FaultyLaunch) -> dict[int, Held]:
    """By process id."""
    state = faulty.launch.state()
    roles = {state["pid"]: "launcher"} | {child["pid"]: child["role"] for child in state["children"]}
    memory, descriptors = memory_mb(roles), num_descriptors(roles)
    return {pid: Held(roles[pid], mb, descriptors[pid]) for pid, mb in memory.items() if pid in descriptors}


def grown(held: list[dict[int, Held]]) -> list[str]:
    """Processes that hold more at the end than when they were warm: at a quarter of the looks at them."""
    found: list[str] = []
    looks: defaultdict[int, list[Held]] = defaultdict(list)
    for look in held:
        for pid, each in look.items():
            looks[pid].append(each)
    for seen in looks.values():
        warm, last = seen[len(seen) // 4], seen[-1]
        if len(seen) >= MIN_LOOKS and last.memory_mb > warm.memory_mb + MAX_GROWTH_MB:
            found.append(f"{last.role}: {warm.memory_mb} to {last.memory_mb} MB in {len(seen)} looks")
        if len(seen) >= MIN_LOOKS and last.num_descriptors > warm.num_descriptors + MAX_MORE_DESCRIPTORS:
            found.append(f"{last.role}: {warm.num_descriptors} to {last.num_descriptors} descriptors")
    return found
