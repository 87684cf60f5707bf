"""Guardian: a small process that removes the run directory of a launcher which was killed.

It is started as `python -S -m runtime.launcher.guardian RUN_DIR LOCK_FD` with a pipe from the launcher as its
standard input, which closes when the launcher ends, however it ends. A launcher that ends normally cleans up
by itself and says so first. Both hold the lock, so no other launch takes the directory while it is being
removed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

DONE = b"."
EXIT_S = 1.0


class Guardian:
    """The launcher's handle of the guardian."""

    def __init__(self, run_dir: Path, lock_fd: int, environment: Mapping[str, str]) -> None:
        """Start the guardian. Raises OSError if no process can be started."""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-S", "-m", "runtime.launcher.guardian", str(run_dir), str(lock_fd)],
            stdin=subprocess.PIPE,
            start_new_session=True,
            pass_fds=(lock_fd,),
            env=environment,
        )
        self.pidfd = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    def dismiss(self) -> None:
        """Tell the guardian that everything is cleaned up, and wait for its end. Works also if it
        was killed.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(DONE)
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            self._process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self.pidfd)


def main(run_dir: Path, lock_fd: int) -> None:
    # It has to outlive a signal that is sent to all processes of a launch.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if os.read(0, 1) == DONE:
        return
    try:
        is_ours = os.path.samestat(os.stat(run_dir / "lock"), os.fstat(lock_fd))
    except FileNotFoundError:
        return
    if is_ours:
        # The lock is removed last: a directory without one does not count as a launch's, and would stay for
        # ever if this process were killed halfway.
        with suppress(OSError):
            for entry in run_dir.iterdir():
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry, ignore_errors=True)
                elif entry.name != "lock":
                    entry.unlink(missing_ok=True)
        shutil.rmtree(run_dir, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
