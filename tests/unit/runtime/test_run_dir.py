"""Run directories: private, held by a lock, leftovers swept, nothing of others touched."""

from __future__ import annotations

import fcntl
import inspect
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from runtime.base.errors import AddressInUse, ConfigError
from runtime.launcher.deaths.death_causes import JUDGED_ROLES
from runtime.ring.endpoints import Endpoints
from runtime.ring.keys import make_keys
from runtime.ring.run_dir import OURS, RunDir, live_run_dirs
from tests.harness.ring.other_user import give_away


@pytest.fixture
def root(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path_factory.mktemp("r")  # sockets' names must be short
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
    return path / "carousel"


@pytest.fixture(autouse=True)
def few_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here nobody cleans up after a launch that was killed, so a lock that is held stays so."""
    monkeypatch.setattr("runtime.ring.run_dir.NUM_TRIES", 3)


def test_a_launch_has_a_private_directory_and_removes_it(root: Path) -> None:
    run_dir = RunDir()
    assert run_dir.path.parent == root
    assert run_dir.path.stat().st_mode & 0o077 == 0
    assert live_run_dirs() == [run_dir.path]
    run_dir.remove()
    assert not run_dir.path.exists()
    assert live_run_dirs() == []


def test_who_cleans_up_temporary_files_sees_that_the_directory_is_in_use(root: Path) -> None:
    """By the directory's own lock, which systemd-tmpfiles looks at: files of a server that has run for ten
    days are old.
    """
    run_dir = RunDir()
    fd = os.open(run_dir.path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    run_dir.remove()
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(fd)


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


@pytest.mark.parametrize("kind", ["directory", "file", "link"])
def test_where_another_user_has_taken_the_root_launches_and_clients_meet_beside_it(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    bait = root.parent / "bait" if kind == "link" else root
    if kind == "file":
        root.touch()
    else:
        (bait / "launch").mkdir(parents=True)
        (bait / "launch" / "lock").touch()
    if kind == "link":
        root.symlink_to(bait)
    give_away(monkeypatch, root)
    with open(bait if kind == "file" else bait / "launch" / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        first, second = RunDir(), RunDir()
        spare = first.path.parent
        assert spare == second.path.parent != root
        assert re.fullmatch(r"carousel-\w{8}", spare.name)
        assert spare.stat().st_mode & 0o777 == 0o700
        assert live_run_dirs() == sorted([first.path, second.path]), "and not the other user's launch"
        assert [record.message for record in caplog.records] == [
            f"{root} is not this user's directory; run directories are in {spare}"
        ]
    first.remove()
    second.remove()
    assert not list(spare.glob("*/lock"))


def test_launches_in_the_root_and_beside_it_are_both_found(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as taken:
        root.mkdir()
        give_away(taken, root)
        first = RunDir()
        other = root.parent / "carousel-somebody"
        (other / "launch").mkdir(parents=True)
    root.rmdir()
    second = RunDir()
    assert live_run_dirs() == [second.path, first.path]
    other.chmod(0o777)
    with (other / "launch" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert live_run_dirs() == [second.path, first.path], "anybody can have put that there"
    first.remove()
    second.remove()


@pytest.mark.parametrize("name", ["thesis.tex", "status.txt", "client_out0.bak", "my_lock"])
def test_a_directory_with_other_files_is_refused_and_kept(tmp_path: Path, name: str) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=re.escape(name)):
        RunDir(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_tokenizer_that_lies_there_is_kept(tmp_path: Path) -> None:
    """Its files have names that a launch's have, too, but there is no lock beside them."""
    tmp_path.chmod(0o700)
    names = {"config.json", "tokenizer.json"}
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match="holds files that are not ours"):
        RunDir(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == names


def test_keys_that_somebody_has_made_there_are_kept(tmp_path: Path) -> None:
    """A launch's own lie beside its lock."""
    tmp_path.chmod(0o700)
    make_keys(tmp_path / "keys")
    with pytest.raises(ConfigError, match="not ours \\(keys\\)"):
        RunDir(str(tmp_path))
    assert (tmp_path / "keys" / "server.key_secret").exists()
    (tmp_path / "lock").touch()
    run_dir = RunDir(str(tmp_path))
    assert not (tmp_path / "keys").exists()
    run_dir.remove()


def test_a_named_directory_of_a_killed_launch_is_taken_over(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    names = (
        "lock",
        "state.json",
        "state.new",
        "config.new",
        "tenants.json",
        "tenants.new",
        "status.new",
        "rank_in0",
        "client_out63",
        "metrics3",
        "client_out",
    )
    for name in names:
        (tmp_path / name).touch()
    run_dir = RunDir(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    run_dir.remove()
    assert not tmp_path.exists()


def names_of_endpoints(endpoints: Endpoints) -> list[str]:
    """All names that Endpoints gives out; of those with a number, the one with 12, and of those with a role,
    that of each.
    """
    names = []
    for name, what in vars(Endpoints).items():
        if isinstance(what, property) or (inspect.isfunction(what) and not name.startswith("_")):
            place = getattr(endpoints, name)
            asked = inspect.signature(place).parameters if callable(place) else {}
            for role in JUDGED_ROLES if "role" in asked else ("",):
                given: dict[str, Any] = {"role": role} if role else {}
                given |= {each: 12 for each in asked if each != "role"}
                names.append(Path(str(place(**given) if callable(place) else place)).name)
    return names


def test_no_name_of_an_endpoint_keeps_the_next_launch_out(tmp_path: Path) -> None:
    names = names_of_endpoints(Endpoints(tmp_path))
    assert {
        "grammar_in",
        "in_hand_grammar12",
        "in_hand_detokenizer12",
        "suspects_tokenizer",
        "suspects_detokenizer",
        "api_orders12",
        "adapters.json",
        "lock",
    } <= set(names)
    assert not [name for name in names if not OURS.fullmatch(name)]


def test_a_directory_that_is_gone_already_is_removed_without_a_word(tmp_path: Path) -> None:
    run_dir = RunDir(str(tmp_path / "run"))
    shutil.rmtree(run_dir.path)
    run_dir.remove()


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


def test_a_directory_open_to_others_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="this user alone"):
        RunDir(str(tmp_path))


def test_a_path_too_long_for_sockets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run_dir"):
        RunDir(str(tmp_path / ("x" * 100)))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("inside", "says"),
    [("", "it is no directory; name"), ("/x", "it is no directory; name")],
)
def test_what_can_be_no_directory_is_refused_in_plain_words(tmp_path: Path, inside: str, says: str) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match=f"^run_dir: {file}.*: {says}"):
        RunDir(f"{file}{inside}")
