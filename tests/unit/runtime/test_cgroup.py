"""Limits of control groups: in a container, in a job below, in either version; none."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from runtime.base import cgroup
from runtime.base.cgroup import NO_LIMIT, memory_left, memory_limit, num_cores

Groups = Callable[[str, Mapping[str, str]], None]


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Groups:
    """Has the kernel say which groups this process is in, and what files of theirs hold."""
    monkeypatch.setattr(cgroup, "CGROUPS", tmp_path / "fs")
    monkeypatch.setattr(cgroup, "OWN_GROUPS", tmp_path / "self")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))

    def write(own: str, files: Mapping[str, str]) -> None:
        (tmp_path / "self").write_text(own)
        for name, text in files.items():
            path = tmp_path / "fs" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")

    return write


def test_a_machine_without_groups_has_no_limits(groups: Groups) -> None:
    assert (num_cores(), memory_limit(), memory_left()) == (64, NO_LIMIT, NO_LIMIT)


@pytest.mark.parametrize(
    ("own", "files"),
    [
        ("0::/\n", {"cpu.max": "max 100000", "memory.max": "max", "memory.current": "7"}),
        (
            "3:memory:/\n2:cpu,cpuacct:/\n",
            {
                "cpu/cpu.cfs_quota_us": "-1",
                "cpu/cpu.cfs_period_us": "100000",
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "memory/memory.usage_in_bytes": "7",
            },
        ),
    ],
)
def test_groups_without_limits_have_none(groups: Groups, own: str, files: Mapping[str, str]) -> None:
    groups(own, files)
    assert (num_cores(), memory_limit(), memory_left()) == (64, NO_LIMIT, NO_LIMIT)


def test_a_container_has_what_its_root_says(groups: Groups) -> None:
    groups("0::/\n", {"cpu.max": "250000 100000", "memory.max": "5000", "memory.current": "2000"})
    assert (num_cores(), memory_limit(), memory_left()) == (3, 5000, 3000)


def test_of_the_groups_above_a_job_the_least_limit_counts(groups: Groups) -> None:
    files = {
        "jobs/cpu.max": "400000 100000",
        "jobs/memory.max": "9000",
        "jobs/memory.current": "8500",
        "jobs/17/cpu.max": "800000 100000",
        "jobs/17/memory.max": "5000",
        "jobs/17/memory.current": "2000",
        "jobs/17/step/cpu.max": "max 100000",
        "jobs/17/step/memory.max": "max",
        "jobs/18/memory.max": "1",
    }
    groups("0::/jobs/17/step\n", files)
    assert (num_cores(), memory_limit(), memory_left()) == (4, 5000, 500)


@pytest.mark.parametrize("place", ["docker/a1/", ""])
def test_the_first_version_has_a_tree_for_each_controller(groups: Groups, place: str) -> None:
    """A container may see its own group as the root of each, and not by the name it is told."""
    files = {
        f"cpu/{place}cpu.cfs_quota_us": "150000",
        f"cpu/{place}cpu.cfs_period_us": "100000",
        f"memory/{place}memory.limit_in_bytes": "5000",
        f"memory/{place}memory.usage_in_bytes": "4000",
        f"memory/{place}memory.stat": "cache 1\ntotal_inactive_file 2500\ntotal_active_file 500",
    }
    groups("4:memory:/docker/a1\n3:cpuset:/x\n2:cpu,cpuacct:/docker/a1\n1:name=systemd:/\n0::/\n", files)
    assert (num_cores(), memory_limit(), memory_left()) == (2, 5000, 4000)


def test_files_that_the_kernel_keeps_leave_room(groups: Groups) -> None:
    """A checkpoint that has just been read, for instance, goes when somebody needs the memory."""
    files = {
        "memory.max": "5000",
        "memory.current": "4900",
        "memory.stat": "anon 1900\nfile 3000\nactive_file 1000\ninactive_file 2000",
    }
    groups("0::/\n", files)
    assert memory_left() == 3100


def test_less_than_a_core_is_one(groups: Groups) -> None:
    groups("0::/\n", {"cpu.max": "20000 100000"})
    assert num_cores() == 1
