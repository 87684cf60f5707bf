"""RunDir: the private directory of one launch, which its launcher makes, locks and removes.

The kernel drops the lock with the process that holds it, so a directory whose lock is free is the leftover of
a killed launch, and the next launch removes it. The default root's name in /tmp can be guessed, so another
user may take it first. A launch then makes a root with a random name beside it. Clients look in all roots
that belong to their own user, and in no others.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runtime.base.environment import default_run_root
from runtime.base.errors import AddressInUse, ConfigError
from runtime.base.ownership import fault_of
from runtime.ring.endpoints import Endpoints

logger = logging.getLogger(__name__)

# All files that a launch makes in its directory. Processes of which there may be several have a numbered
# socket or file each.
OURS = re.compile(
    r"(adapters|config|state|tenants)\.(json|new)|adapters(\.lock)?|tokenizer\.(json|\d+)|events\.jsonl|lock"
    r"|status(\.new)?|launcher_in|scheduler_in|step_results|grammar_(in|out)"
    r"|profile-[\d-]+\.json|keys|nodes(\.new)?|roster|suspects(_(detokenizer|tokenizer|grammar))?(\.new)?"
    r"|(api_orders|client_out|detokenizer_in|in_hand_(detokenizer|tokenizer|grammar)|http_spans|metrics|rank_in|ranks|tokenizer_in)\d*"
)
# Others hold the lock for a moment: clients that check which launches are alive, and the guardian of a killed
# launch while it cleans up.
NUM_TRIES = 200
RETRY_S = 0.01


class RunDir:
    def __init__(self, wanted: str = "") -> None:
        """Make and lock a directory: `wanted`, or a new one under the user's root. Raises AddressInUse if a
        live launch holds it, ConfigError if others can access it or it cannot be made. A refused directory is
        left unchanged.
        """
        try:
            if wanted:
                self._take(Path(wanted).absolute())
            else:
                root = _run_root()
                with _locked(root / ".lock"):
                    _sweep(root)
                    self._take(root / uuid.uuid4().hex[:12])
        except OSError as error:
            no_directory = isinstance(error, FileExistsError | NotADirectoryError)
            reason = "it is no directory" if no_directory else error.strerror
            raise ConfigError(
                f"run_dir: {error.filename or wanted}: {reason}; name an empty directory, or one to be made"
            ) from None

    def _take(self, path: Path) -> None:
        self.path = path
        self.endpoints = Endpoints(path)
        names = {entry.name for entry in _own_directory(path).iterdir()}
        # The files of a launch are beside its lock, which is created first and removed last. Files without a
        # lock belong to a user who wants to keep them: a model has a config.json and a tokenizer.json, too.
        ours = {name for name in names if OURS.fullmatch(name)} if "lock" in names else set()
        if names - ours:
            raise ConfigError(
                f"run_dir: {path} holds files that are not ours ({min(names - ours)}); name an empty "
                "directory"
            )
        fd = _try_lock(self.endpoints.lock_file, NUM_TRIES)
        if fd is None:
            raise AddressInUse(f"run_dir: {path} belongs to a launch that is alive")
        self._lock_fd = fd
        self._folder_fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # a file system without locks
            # systemd-tmpfiles removes old files from /tmp, but nothing in a folder that is locked itself.
            fcntl.flock(self._folder_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        self._empty()  # files of a killed launch

    def _empty(self) -> None:
        for entry in self.path.iterdir():
            if entry == self.endpoints.lock_file:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)

    @property
    def lock_fd(self) -> int:
        """File descriptor of the lock. A process that inherits it also holds the lock."""
        return self._lock_fd

    def clear(self) -> None:
        """Remove the directory; the lock is still held."""
        # The lock's name is removed last: a process that takes the directory over must not lose its files to
        # this one.
        with contextlib.suppress(OSError):
            self._empty()
        shutil.rmtree(self.path, ignore_errors=True)

    def release(self) -> None:
        os.close(self._folder_fd)
        os.close(self._lock_fd)

    def remove(self) -> None:
        """Remove the directory and release the lock."""
        self.clear()
        self.release()


def live_run_dirs() -> list[Path]:
    """Return the run directories under this user's roots whose launcher is alive."""
    default = default_run_root()
    own = [root for root in (default, *_spare_roots(default)) if _is_own(root)]
    return [path for root in own for path in sorted(root.iterdir()) if is_held(path)]


def is_held(run_dir: Path) -> bool:
    """Return True if a run directory exists and its launcher is alive, or its guardian is still
    removing it.
    """
    try:
        fd = os.open(run_dir / "lock", os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        # Shared, so that several processes may check at once without noticing each other.
        return not _try_flock(fd, fcntl.LOCK_SH)
    finally:
        os.close(fd)


def check_run_dir(path: Path) -> None:
    """Raise ConfigError if a client should not trust the directory, because another user may have made it. A
    directory that does not exist is accepted.
    """
    try:
        fault = fault_of(path)
    except OSError:
        return
    if fault is not None:
        raise ConfigError(f"run_dir: {fault}")


def _run_root() -> Path:
    """Return the default root or, if another user has taken its name, a root of this user's own beside it."""
    default, is_taken = default_run_root(), False
    with contextlib.suppress(FileNotFoundError):
        is_taken = default.lstat().st_uid != os.getuid()
    if not is_taken:
        return _own_directory(default)
    for spare in _spare_roots(default):
        if not spare.stat().st_mode & 0o077:
            return spare
    spare = Path(tempfile.mkdtemp(prefix=f"{default.name}-", dir=default.parent))
    logger.warning("%s is not this user's directory; run directories are in %s", default, spare)
    return spare


def _spare_roots(default: Path) -> list[Path]:
    """Return the roots that were made because another user had taken the default name."""
    return sorted(filter(_is_own, default.parent.glob(f"{default.name}-*")))


def _is_own(path: Path) -> bool:
    """Return True for a directory (not a link) that this user owns and others cannot change."""
    try:
        info = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o022


def _own_directory(path: Path) -> Path:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = path.lstat()
    if info.st_uid != os.getuid() or not path.is_dir() or path.is_symlink() or info.st_mode & 0o077:
        raise ConfigError(f"run_dir: {path} must be a directory of this user alone (chmod 700)")
    return path


def _try_lock(path: Path, num_tries: int = 1) -> int | None:
    for number in range(num_tries):
        if number:
            time.sleep(RETRY_S)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if _try_flock(fd, fcntl.LOCK_EX) and _is_named(path, fd):
            return fd
        os.close(fd)
    return None


def _try_flock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_named(path: Path, fd: int) -> bool:
    """Return True if the name still refers to this file. A launch that ends removes the name of its lock."""
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def _sweep(root: Path) -> None:
    for path in root.iterdir():
        if not (path / "lock").exists():
            continue
        fd = _try_lock(path / "lock")
        if fd is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(fd)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
