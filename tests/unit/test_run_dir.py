"""Run directories: private, held by a lock, leftovers swept, nothing of others touched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runtime.errors import AddressInUse, ConfigError
from runtime.run_dir import RunDir, live_run_dirs
from runtime.status_page import ROLES, Status, StatusPage


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "carousel"


def test_a_launch_has_a_private_directory_and_removes_it(root: Path) -> None:
    run_dir = RunDir()
    assert run_dir.path.parent == root
    assert run_dir.path.stat().st_mode & 0o077 == 0
    assert live_run_dirs() == [run_dir.path]
    run_dir.remove()
    assert not run_dir.path.exists()
    assert live_run_dirs() == []


def test_two_launches_do_not_share(root: Path) -> None:
    first, second = RunDir(), RunDir()
    assert first.path != second.path
    with pytest.raises(AddressInUse, match="alive"):
        RunDir(str(first.path))
    first.remove()
    second.remove()


def test_what_a_killed_launch_left_is_swept(root: Path) -> None:
    left = root / "0123456789ab"
    left.mkdir(parents=True)
    root.chmod(0o700)
    (left / "lock").touch()
    (left / "state.json").touch()
    assert live_run_dirs() == []
    run_dir = RunDir()
    assert not left.exists()
    run_dir.remove()


def test_a_directory_with_other_files_is_refused_and_kept(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"thesis\.tex"):
        RunDir(str(tmp_path))
    assert (tmp_path / "thesis.tex").exists()


def test_a_directory_open_to_others_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="this user alone"):
        RunDir(str(tmp_path))


def test_a_path_too_long_for_sockets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run_dir"):
        RunDir(str(tmp_path / ("x" * 100)))


def test_status_page_shows_every_slot_to_all(tmp_path: Path) -> None:
    owner = StatusPage(tmp_path / "status", create=True)
    reader = StatusPage(tmp_path / "status")
    for n, role in enumerate(ROLES):
        assert reader.read(role) == Status()
        owner.write(role, Status(1, os.getpid(), "ready", 10 + n, num_running=n, tokens_per_s=0.5))
    for n, role in enumerate(ROLES):
        assert reader.read(role) == Status(1, os.getpid(), "ready", 10 + n, num_running=n, tokens_per_s=0.5)
    owner.close()
    reader.close()


def test_a_slot_whose_owner_died_while_writing_reads_as_absent(tmp_path: Path) -> None:
    page = StatusPage(tmp_path / "status", create=True)
    page.write("scheduler", Status(1, 2, "ready"))
    (tmp_path / "status").open("r+b").close()
    with (tmp_path / "status").open("r+b") as file:
        file.seek(128)
        file.write(b"\x03")
    assert page.read("scheduler") == Status()
    page.write("scheduler", Status(2, 3, "ready"))
    assert page.read("scheduler") == Status(2, 3, "ready")
    page.close()
