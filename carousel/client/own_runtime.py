"""OwnRuntime: a runtime that serves only this process, as a child process, and its messages during
the start.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from runtime.base.environment import child_environment
from runtime.base.errors import ConfigError, StartError
from runtime.ring.endpoints import MAX_RUN_DIR_BYTES, Endpoints
from runtime.settings.keywords import flags_of_keywords, given_settings

POLL_S = 0.05
STOP_TIMEOUT_S = 10.0
RUN_DIR_PREFIX = "carousel-llm-"
RUN_DIR_BYTES = len(f"/{RUN_DIR_PREFIX}") + 8
"""Length of what mkdtemp puts behind the directory of temporary files."""
MAX_QUEUED = 1 << 20
"""Maximum number of requests that the runtime queues. It is not shared, so it accepts everything from its
only caller.
"""
DEFAULTS = {
    "max_queued_requests": MAX_QUEUED,
    "max_queued_requests_per_client": MAX_QUEUED,
    "queue_timeout": 0.0,
    "log_level": "warning",
}
"""Default settings of such a runtime."""


class OwnRuntime:
    """A runtime that serves only this process: the child process that is its launcher, and its messages."""

    def __init__(
        self, model: str | Path, settings: dict[str, Any], named_by: Mapping[str, str] | None = None
    ) -> None:
        """Start the runtime.

        named_by: the caller's names of settings that it calls otherwise, for errors.
        Raises ConfigError, before anything is started, for an unknown or wrong setting.
        """
        self._named_by = named_by or {}
        try:
            flags = flags_of_keywords({**given_settings(settings, DEFAULTS), "model": model})
        except ConfigError as error:
            raise ConfigError(self._as_written(str(error))) from None
        self.run_dir = _make_run_dir()
        self._owner_pid = os.getpid()
        self._state_file = Endpoints(self.run_dir).state_file
        self._last_lines: deque[str] = deque(maxlen=20)
        # A session of its own: Ctrl-C reaches this process only, which decides what happens to its runtime.
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "runtime.launcher.main"),
                *flags,
                "--no-http",
                f"--run-dir={self.run_dir}",
                f"--parent-pid={os.getpid()}",
                "--drain-timeout=0",  # the process that stops it is its only caller
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env=child_environment(),
        )
        assert self._process.stderr is not None
        self._reader = threading.Thread(
            target=_relay, args=(self._process.stderr, self._last_lines), name="carousel-log", daemon=True
        )
        self._reader.start()

    def wait_ready(self) -> None:
        """Wait until the runtime is ready. The launcher limits the time. Raises StartError if it fails."""
        while self._state() != "ready":
            if self._process.poll() is not None:
                self._reader.join(STOP_TIMEOUT_S)
                error = StartError(self._last_words())
                error.exit_code = self._process.returncode
                raise error
            time.sleep(POLL_S)

    def _state(self) -> Any:
        try:
            return msgspec.json.decode(self._state_file.read_bytes())["state"]
        except FileNotFoundError:
            return "absent"

    def _last_words(self) -> str:
        said = [line for line in self._last_lines if line.startswith("error: ")] or list(self._last_lines)
        reason = (
            said[-1].removeprefix("error: ") if said else f"it ended with code {self._process.returncode}"
        )
        return f"the runtime could not start: {self._as_written(reason)}"

    def _as_written(self, message: str) -> str:
        """Return an error that begins with a setting with the caller's name of it."""
        setting, colon, rest = message.partition(":")
        return self._named_by.get(setting, setting) + colon + rest

    def stop(self) -> None:
        """End the runtime and remove its files. May be called again."""
        if os.getpid() != self._owner_pid:
            return  # a forked child has a copy of the object, but the runtime is its parent's
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(STOP_TIMEOUT_S)
        shutil.rmtree(self.run_dir, ignore_errors=True)


def _make_run_dir() -> Path:
    """Make the run directory where temporary files are or, if that path is too long for the names of sockets,
    as that of a job's own directory may be, in /tmp.
    """
    fits = len(os.fsencode(tempfile.gettempdir())) + RUN_DIR_BYTES <= MAX_RUN_DIR_BYTES
    return Path(tempfile.mkdtemp(prefix=RUN_DIR_PREFIX, dir=None if fits else "/tmp"))


def _relay(source: BinaryIO, last_lines: deque[str]) -> None:
    with source:
        for line in source:
            text = line.decode(errors="replace").rstrip("\n")
            last_lines.append(text)
            print(text, file=sys.stderr, flush=True)
