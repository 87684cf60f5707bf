"""Run directories: private, held by a lock, leftovers swept, nothing of others touched."""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from runtime import status_page
from runtime.errors import AddressInUse, ConfigError
from runtime.run_dir import RunDir, live_run_dirs
from runtime.status_page import ROLES, Status, StatusPage

ROOT = Path(__file__).resolve().parents[2]


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
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_named_directory_of_a_killed_launch_is_taken_over(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    for name in ("lock", "state.json", "state.new", "config.new", "rank_in0", "client_out"):
        (tmp_path / name).touch()
    run_dir = RunDir(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    run_dir.remove()
    assert not tmp_path.exists()


def test_a_directory_that_is_gone_already_is_removed_without_a_word(tmp_path: Path) -> None:
    run_dir = RunDir(str(tmp_path / "run"))
    shutil.rmtree(run_dir.path)
    run_dir.remove()


def test_clients_that_look_who_is_alive_disturb_neither_each_other_nor_a_launch(root: Path) -> None:
    """Random by its threads: without care about one round in a hundred fails, so a false pass is below 1%."""
    stop = threading.Event()
    seen: list[int] = []

    def look() -> None:
        while not stop.is_set():
            seen.append(len(live_run_dirs()))

    lookers = [threading.Thread(target=look) for _ in range(3)]
    for looker in lookers:
        looker.start()
    try:
        for _ in range(100):
            run_dir = RunDir()
            run_dir.remove()
    finally:
        stop.set()
        for looker in lookers:
            looker.join()
    assert set(seen) <= {0, 1}


def test_the_lock_of_a_launch_that_is_ending_is_not_taken_for_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = RunDir(str(tmp_path / "run"))
    flock = fcntl.flock

    def end_first(fd: int, kind: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        first.remove()
        first.path.mkdir(mode=0o700)
        flock(fd, kind)

    monkeypatch.setattr(fcntl, "flock", end_first)
    second = RunDir(str(tmp_path / "run"))
    with pytest.raises(AddressInUse):
        RunDir(str(tmp_path / "run"))
    second.remove()


def test_a_status_page_has_its_disk_space_from_the_start(tmp_path: Path) -> None:
    """Where it was a hole, the first write on a full disk would be a SIGBUS."""
    page = StatusPage(tmp_path / "status", create=True)
    assert (tmp_path / "status").stat().st_blocks > 0
    page.close()


def test_a_directory_open_to_others_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="this user alone"):
        RunDir(str(tmp_path))


def test_a_path_too_long_for_sockets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run_dir"):
        RunDir(str(tmp_path / ("x" * 100)))
    assert not list(tmp_path.iterdir())


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


def test_a_slot_in_the_middle_of_a_write_reads_as_it_was_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner may be held up there, or killed: nobody may take it for absent."""
    page = StatusPage(tmp_path / "status", create=True)
    assert status_page._copy_at(0, 1) + status_page._FIELDS.size <= status_page.SLOT_BYTES
    for number in range(1, 4):
        page.write("scheduler", Status(number, 3, "ready"))

        class Interrupted:
            size = status_page._FIELDS.size

            def pack_into(self, buffer: mmap.mmap, at: int, *fields: int) -> None:
                buffer[at : at + self.size // 2] = b"\xff" * (self.size // 2)
                raise InterruptedError

        with monkeypatch.context() as context:
            context.setattr(status_page, "_FIELDS", Interrupted())
            with pytest.raises(InterruptedError):
                page.write("scheduler", Status(99, 99, "failed"))
        assert page.read("scheduler") == Status(number, 3, "ready")
        assert page.read("worker") == Status()
    page.close()


def test_a_slot_that_is_written_all_the_time_is_never_read_half(tmp_path: Path) -> None:
    """A reader that took a torn slot would see two numbers that differ."""
    page = StatusPage(tmp_path / "status", create=True)
    code = (
        "import sys; from pathlib import Path; from runtime.status_page import *\n"
        "page, n = StatusPage(Path(sys.argv[1])), 0\n"
        "while page.read('launcher').state != 'failed':\n"
        "    n += 1; page.write('worker', Status(n, 1, 'ready', n, n, n, n, n, n, n, n, n))"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "status")], cwd=ROOT)
    try:
        while page.read("worker").epoch == 0:
            assert writer.poll() is None
        seen: set[int] = set()
        while len(seen) < 300:
            status = page.read("worker")
            seen.add(status.epoch)
            assert len({*status[3:]} | {status.epoch}) == 1, status
    finally:
        page.write("launcher", Status(state="failed"))
        writer.wait(10)
        page.close()
