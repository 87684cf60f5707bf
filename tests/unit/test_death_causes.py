"""Which deaths of the engine count against the requests that were there."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from runtime.death_causes import DeathCauses


@pytest.fixture
def vmstat(tmp_path: Path) -> Path:
    file = tmp_path / "vmstat"
    file.write_text("nr_free_pages 7\noom_kill 3\noom_kill_disable 9\n")
    return file


@pytest.mark.parametrize("code", [1, 70, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGFPE])
def test_what_a_process_does_itself_can_be_a_requests_doing(vmstat: Path, code: int) -> None:
    assert DeathCauses(vmstat).may_be_a_request([code], hung=False)


@pytest.mark.parametrize("code", [0, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP])
def test_what_is_done_to_it_is_not(vmstat: Path, code: int) -> None:
    causes = DeathCauses(vmstat)
    assert not causes.may_be_a_request([code], hung=False)
    assert not causes.may_be_a_request([1, code], hung=False), "the other one missed it"


def test_a_hang_is(vmstat: Path) -> None:
    assert DeathCauses(vmstat).may_be_a_request([-signal.SIGKILL], hung=True)


def test_a_kill_for_lack_of_memory_is_and_each_counts_once(vmstat: Path) -> None:
    causes = DeathCauses(vmstat)
    vmstat.write_text("nr_free_pages 7\noom_kill 4\n")
    assert causes.may_be_a_request([-signal.SIGKILL], hung=False)
    assert not causes.may_be_a_request([-signal.SIGKILL], hung=False)


def test_a_kernel_that_does_not_say_counts_none(tmp_path: Path) -> None:
    assert not DeathCauses(tmp_path / "vmstat").may_be_a_request([-signal.SIGKILL], hung=False)
