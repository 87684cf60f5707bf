"""SIGHUP: the launcher reads its API keys again and goes on, whatever is wrong with them."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.launcher import tenants_reload
from runtime.launcher.supervisor import Supervisor
from runtime.ring.tenants import TenantsFile, read_tenants
from runtime.settings.config import RuntimeConfig
from tests.cpu.launcher.test_supervisor import started
from tests.harness.ring.launched import wait_until

BEFORE = '[alice]\nkey = "key of alice"\n[bob]\nkey = "key of bob"\n'
AFTER = '[alice]\nkey = "key of alice"\nrole = "admin"\n[carol]\nkey = "key of carol"\n'


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(BEFORE)
    path.chmod(0o600)
    return path


@pytest.fixture
def supervisor(tmp_path: Path, keys: Path) -> Iterator[Supervisor]:
    config = RuntimeConfig(run_dir=str(tmp_path / "run"), no_http=True, api_keys=str(keys))
    with started(config) as supervisor:
        yield supervisor


def hang_up(supervisor: Supervisor) -> None:
    """Send the launcher SIGHUP and let it turn until it has read the keys."""
    os.kill(os.getpid(), signal.SIGHUP)
    supervisor._turn()
    wait_until(lambda: not is_reading(supervisor), 5.0, "the keys are read")


def is_reading(supervisor: Supervisor) -> bool:
    thread = supervisor.names.tenants._thread
    return thread is not None and thread.is_alive()


def names(supervisor: Supervisor) -> set[str]:
    tenants = TenantsFile(supervisor.names.endpoints.tenants_file).read_if_changed()
    assert tenants is not None
    return {tenant.name for tenant in tenants.tenants}


def test_a_hangup_has_the_keys_read_again(
    supervisor: Supervisor, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert names(supervisor) == {"alice", "bob"}
    keys.write_text(AFTER)
    supervisor._turn()
    assert names(supervisor) == {"alice", "bob"}, "nobody has asked for it"
    hang_up(supervisor)
    assert names(supervisor) == {"alice", "carol"}
    assert caplog.messages[-1] == "API keys read again: 2 tenants, 1 new, 1 changed, 1 gone"
    assert not supervisor._status.is_stopping


@pytest.mark.parametrize("mistake", ["role", "mode", "missing"])
def test_a_mistake_in_the_new_keys_changes_nothing(
    supervisor: Supervisor, keys: Path, caplog: pytest.LogCaptureFixture, mistake: str
) -> None:
    keys.write_text(AFTER.replace("admin", "root" if mistake == "role" else "admin"))
    if mistake == "mode":
        keys.chmod(0o644)
    if mistake == "missing":
        keys.unlink()
    hang_up(supervisor)
    assert names(supervisor) == {"alice", "bob"}
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    said = {"role": "Invalid enum value 'root'", "mode": "chmod 600", "missing": "cannot be read"}
    assert said[mistake] in record.getMessage()
    assert str(keys) in record.getMessage()
    assert "key of" not in caplog.text
    assert not supervisor._status.is_stopping


def test_a_pipe_in_the_place_of_the_keys_keeps_no_later_ones_out(
    supervisor: Supervisor, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody writes into it. Before, the read never ended, and no later SIGHUP had an effect."""
    keys.unlink()
    os.mkfifo(keys, 0o600)
    hang_up(supervisor)
    assert f"the API keys stay as they are: api_keys: {keys} is a pipe" in caplog.text
    keys.unlink()
    keys.write_text(AFTER)
    keys.chmod(0o600)
    hang_up(supervisor)
    assert names(supervisor) == {"alice", "carol"}


def test_keys_that_are_nested_without_end_change_nothing(
    supervisor: Supervisor, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys.write_text("alice = " + "[" * 100_000)
    hang_up(supervisor)
    assert f"the API keys stay as they are: api_keys: {keys} is not TOML" in caplog.text
    assert names(supervisor) == {"alice", "bob"}


def test_a_disk_that_hangs_keeps_no_process_from_being_watched(
    supervisor: Supervisor, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, reads = threading.Event(), []

    def read_slowly(config: RuntimeConfig) -> object:
        reads.append(config)
        answers.wait(20.0)
        return read_tenants(config)

    monkeypatch.setattr(tenants_reload, "read_tenants", read_slowly)
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGHUP)
        before = time.monotonic_ns()
        supervisor._turn()
        assert supervisor.names.page.read("launcher").heartbeat_ns > before
    wait_until(lambda: bool(reads), 5.0, "the first one begins")
    assert len(reads) == 1
    keys.write_text(AFTER)
    answers.set()
    wait_until(lambda: not is_reading(supervisor), 5.0, "the first one is read")
    supervisor._turn()
    wait_until(lambda: not is_reading(supervisor), 5.0, "and what was asked for meanwhile")
    assert len(reads) == 2
    assert names(supervisor) == {"alice", "carol"}


def test_a_launch_that_has_ended_writes_no_keys(
    tmp_path: Path, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    config = RuntimeConfig(run_dir=str(tmp_path / "run"), no_http=True, api_keys=str(keys))
    with started(config) as supervisor:
        monkeypatch.setattr(
            tenants_reload, "read_tenants", lambda config: answers.wait(20.0) and read_tenants(config)
        )
        os.kill(os.getpid(), signal.SIGHUP)
        supervisor._turn()
    (tmp_path / "run").mkdir()
    answers.set()
    wait_until(lambda: not is_reading(supervisor), 5.0, "the thread ends")
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.parametrize("api_key", ["", "secret"])
def test_without_a_file_of_keys_a_hangup_ends_the_launch(tmp_path: Path, api_key: str) -> None:
    config = RuntimeConfig(run_dir=str(tmp_path / "run"), no_http=True, api_key=api_key)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has it ignored
    try:
        with started(config) as supervisor:
            os.kill(os.getpid(), signal.SIGHUP)
            assert supervisor._status.is_stopping
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_file_of_one_key_is_read_again_too(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("old")
    path.chmod(0o600)
    config = RuntimeConfig(run_dir=str(tmp_path / "run"), no_http=True, api_key_file=str(path))
    with started(config) as supervisor:
        path.write_text("new")
        hang_up(supervisor)
        tenants = TenantsFile(supervisor.names.endpoints.tenants_file).read_if_changed()
        assert tenants is not None
        assert tenants.of_key(b"old") is None
        assert tenants.of_key(b"new") is not None


def test_a_setting_that_asks_for_the_default_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for is_set in (True, False):
        config = RuntimeConfig(api_key="secret", cache_salt_per_api_key=is_set)
        tenants_reload.TenantsReload(config, tmp_path / "tenants.json").close()
    assert [message for message in caplog.messages if "by default now" in message] == caplog.messages[:1]
    assert caplog.messages[0].startswith("--cache-salt-per-api-key: ")
