"""Which deaths of the engine count against the requests that were there."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from runtime.launcher.deaths.death_causes import LOOK_S, OUT_OF_MEMORY_S, DeathCauses


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A /proc of a machine without cgroups."""
    (tmp_path / "vmstat").write_text("nr_free_pages 7\noom_kill 3\noom_kill_disable 9\n")
    return tmp_path


def causes_of(proc: Path) -> DeathCauses:
    return DeathCauses(proc, proc / "cgroup")


@pytest.mark.parametrize("code", [1, 70, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGFPE])
def test_what_a_process_does_itself_can_be_a_requests_doing(proc: Path, code: int) -> None:
    assert causes_of(proc).may_be_a_request([code], hung=False)


@pytest.mark.parametrize("code", [0, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP])
def test_what_is_done_to_it_is_not(proc: Path, code: int) -> None:
    causes = causes_of(proc)
    assert not causes.may_be_a_request([code], hung=False)
    assert not causes.may_be_a_request([1, code], hung=False), "the other one missed it"


def test_a_hang_is(proc: Path) -> None:
    assert causes_of(proc).may_be_a_request([-signal.SIGKILL], hung=True)


def test_a_kill_for_lack_of_memory_is_and_each_counts_once(proc: Path) -> None:
    causes = causes_of(proc)
    (proc / "vmstat").write_text("nr_free_pages 7\noom_kill 4\n")
    assert causes.may_be_a_request([-signal.SIGKILL], hung=False)
    assert not causes.may_be_a_request([-signal.SIGKILL], hung=False)


def test_a_kill_elsewhere_in_the_cgroup_explains_no_later_death(proc: Path) -> None:
    """A compiler, or whatever else shares the cgroup, may have been killed long before `kill -9` comes."""
    now_s = 100.0
    causes = DeathCauses(proc, proc / "cgroup", lambda: now_s)
    (proc / "vmstat").write_text("nr_free_pages 7\noom_kill 4\n")
    causes.look()
    now_s += LOOK_S
    causes.look()
    now_s += OUT_OF_MEMORY_S + 0.1
    assert not causes.may_be_a_request([-signal.SIGKILL], hung=False)
    (proc / "vmstat").write_text("nr_free_pages 7\noom_kill 5\n")
    causes.look()
    now_s += OUT_OF_MEMORY_S
    assert causes.may_be_a_request([1, -signal.SIGKILL], hung=False), "a large process takes its time to end"


def test_a_kill_for_lack_of_memory_explains_no_end_that_was_asked_for(proc: Path) -> None:
    causes = causes_of(proc)
    (proc / "vmstat").write_text("nr_free_pages 7\noom_kill 4\n")
    assert not causes.may_be_a_request([-signal.SIGTERM], hung=False)
    assert causes.may_be_a_request([-signal.SIGKILL], hung=False)


@pytest.mark.parametrize(
    ("groups", "counter"),
    [
        ("0::/user/run-7.scope\n", "user/run-7.scope/memory.events"),
        ("0::/\n", "memory.events"),
        ("9:cpu,cpuacct:/a\n4:memory:/pods/7\n0::/\n", "memory/pods/7/memory.oom_control"),
    ],
)
def test_what_the_kernel_kills_elsewhere_on_the_machine_is_not_ours(
    proc: Path, groups: str, counter: str
) -> None:
    file = proc / "cgroup" / counter
    file.parent.mkdir(parents=True)
    file.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\noom_group_kill 0\n")
    (proc / "self").mkdir()
    (proc / "self" / "cgroup").write_text(groups)
    causes = causes_of(proc)
    (proc / "vmstat").write_text("oom_kill 4\n")
    assert not causes.may_be_a_request([-signal.SIGKILL], hung=False)
    file.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\noom_group_kill 0\n")
    assert causes.may_be_a_request([-signal.SIGKILL], hung=False)
    assert not causes.may_be_a_request([-signal.SIGKILL], hung=False)


def test_the_machine_counts_where_the_cgroup_does_not(proc: Path) -> None:
    (proc / "self").mkdir()
    (proc / "self" / "cgroup").write_text("0::/gone\n")
    causes = causes_of(proc)
    (proc / "vmstat").write_text("oom_kill 4\n")
    assert causes.may_be_a_request([-signal.SIGKILL], hung=False)


def test_a_kernel_that_does_not_say_counts_none(tmp_path: Path) -> None:
    assert not causes_of(tmp_path).may_be_a_request([-signal.SIGKILL], hung=False)
