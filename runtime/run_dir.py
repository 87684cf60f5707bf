"""RunDir: the private directory of one launch, made, held and removed by its launcher.

The holder of the lock is alive by definition: the kernel drops the lock with the process. A directory in the
root whose lock is free is a leftover of a launch that was killed, and the next launch removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runtime.config import default_run_root
from runtime.endpoints import Endpoints
from runtime.errors import AddressInUse, ConfigError


class RunDir:
    def __init__(self, wanted: str = "") -> None:
        """Make and lock a directory: `wanted`, or a new one under the user's root.

        Raises AddressInUse when a live launch holds it, ConfigError when it is not ours alone or cannot be
        made.
        """
        try:
            if wanted:
                self.path = Path(wanted).absolute()
                self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._lock(self.path)
                self._clear(self.path)
            else:
                root = _own_directory(default_run_root())
                with _locked(root / ".lock"):
                    _sweep(root)
                    self.path = root / uuid.uuid4().hex[:12]
                    self.path.mkdir(mode=0o700)
                    self._lock(self.path)
        except OSError as error:
            raise ConfigError(f"run_dir: {error}") from None
        self.endpoints = Endpoints(self.path)

    def _lock(self, path: Path) -> None:
        _own_directory(path)
        fd = _try_lock(path / "lock")
        if fd is None:
            raise AddressInUse(f"run_dir: {path} belongs to a launch that is alive")
        self._lock_fd = fd

    @staticmethod
    def _clear(path: Path) -> None:
        """Remove what a killed launch left here; refuse a directory with anything else in it."""
        known = {
            "tokenizer_in",
            "scheduler_in",
            "detokenizer_in",
            "client_out",
            "step_results",
            "launcher_in",
            "lock",
        }
        known |= {"config.json", "state.json", "status"}
        for entry in path.iterdir():
            if entry.name not in known and not entry.name.startswith("rank_in"):
                raise ConfigError(
                    f"run_dir: {path} holds files that are not ours ({entry.name}); name an empty directory"
                )
            if entry.name != "lock":
                entry.unlink()

    def remove(self) -> None:
        """Remove the directory and give up the lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock_fd)


def live_run_dirs() -> list[Path]:
    """Run directories under the user's root whose launcher is alive."""
    root = default_run_root()
    if not root.is_dir():
        return []
    return [
        path for path in sorted(root.iterdir()) if (path / "lock").exists() and not _is_free(path / "lock")
    ]


def _own_directory(path: Path) -> Path:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = path.lstat()
    if info.st_uid != os.getuid() or not path.is_dir() or path.is_symlink() or info.st_mode & 0o077:
        raise ConfigError(f"run_dir: {path} must be a directory of this user alone (chmod 700)")
    return path


def _try_lock(path: Path) -> int | None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def _is_free(path: Path) -> bool:
    fd = _try_lock(path)
    if fd is None:
        return False
    os.close(fd)
    return True


def _sweep(root: Path) -> None:
    for path in root.iterdir():
        if path.is_dir() and (path / "lock").exists() and _is_free(path / "lock"):
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
