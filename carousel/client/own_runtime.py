"""OwnRuntime and OwnServer: a runtime that serves only this process, as a child process, and its messages
during the start.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import msgspec

from runtime.base.environment import API_KEY_VARIABLE, child_environment
from runtime.base.errors import ConfigError, StartError
from runtime.base.random_ids import random_id
from runtime.ring.endpoints import MAX_RUN_DIR_BYTES, Endpoints
from runtime.ring.process import LaunchFile
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
OTHERS_SETTINGS = ("api_key", "api_key_file", "api_keys", "ssl_certfile", "root_path")
"""Settings of HTTP servers for others than the process that starts them."""
OTHERS_ADVICE = "is for a server that others ask, too; leave it out, or start that server and name its URL"


ERROR_PREFIX = "error: "
"""Beginning of the line with which a launcher says why it ends, unless it logs in JSON."""


class _Port(msgspec.Struct):
    port: int


class _LogLine(msgspec.Struct):
    level: str
    process: str
    message: str


class _ChildRuntime:
    """The child process that is the launcher of a runtime, and its messages."""

    def __init__(
        self,
        flags: Sequence[str],
        *,
        named_by: Mapping[str, str] = MappingProxyType({}),
        environment: Mapping[str, str] = MappingProxyType({}),
        relays_errors: bool = True,
    ) -> None:
        """Start the runtime.

        flags: settings in addition to those that all such runtimes have. named_by: the caller's names of
        settings that it calls otherwise, for errors. environment: variables in addition to this process's.
        relays_errors: False if the caller itself tells the user why the runtime has ended.
        """
        self._named_by = named_by
        self.run_dir = _make_run_dir()
        self._owner_pid = os.getpid()
        self._state_file = Endpoints(self.run_dir).state_file
        self._last_lines: deque[str] = deque(maxlen=20)
        # A session of its own: Ctrl-C reaches this process only, which decides what happens to its runtime.
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "runtime.launcher.main"),
                *flags,
                f"--run-dir={self.run_dir}",
                f"--parent-pid={os.getpid()}",
                "--drain-timeout=0",  # the process that stops it is its only caller
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env={**child_environment(), **environment},
        )
        assert self._process.stderr is not None
        self._reader = threading.Thread(
            target=_relay,
            args=(self._process.stderr, self._last_lines, relays_errors),
            name="carousel-log",
            daemon=True,
        )
        self._reader.start()

    def wait_ready(self) -> None:
        """Wait until the runtime is ready. The launcher limits the time. Raises StartError if it fails."""
        while self._state() != "ready":
            self.check_alive("the runtime could not start")
            time.sleep(POLL_S)

    def check_alive(self, otherwise: str) -> None:
        """Raise StartError, whose text begins with `otherwise`, if the runtime has ended."""
        if self._process.poll() is not None:
            self._reader.join(STOP_TIMEOUT_S)
            error = StartError(f"{otherwise}: {self._last_words()}")
            error.exit_code = self._process.returncode
            raise error

    def _state(self) -> Any:
        try:
            return msgspec.json.decode(self._state_file.read_bytes())["state"]
        except FileNotFoundError:
            return "absent"

    def _last_words(self) -> str:
        reasons = [reason for line in self._last_lines if (reason := _reason_in(line))]
        said = reasons or self._last_lines or [f"it ended with code {self._process.returncode}"]
        return self._as_written(said[-1])

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


class OwnRuntime(_ChildRuntime):
    """A runtime without HTTP, for the client library."""

    def __init__(
        self, model: str | Path, settings: dict[str, Any], named_by: Mapping[str, str] | None = None
    ) -> None:
        """Start the runtime. Raises ConfigError, before anything is started, for an unknown or wrong setting.

        named_by: the caller's names of settings that it calls otherwise, for errors.
        """
        self._named_by = named_by or {}
        try:
            flags = flags_of_keywords({**given_settings(settings, DEFAULTS), "model": model})
        except ConfigError as error:
            raise ConfigError(self._as_written(str(error))) from None
        super().__init__([*flags, "--no-http"], named_by=self._named_by)


class OwnServer(_ChildRuntime):
    """A runtime with an HTTP server on loopback, which asks for a key that only this process has."""

    def __init__(self, flags: Sequence[str]) -> None:
        """Start the runtime with a command line of settings, as of `carousel`. `wait_ready` raises StartError
        for a wrong one, and `address` for one that makes the server another's.
        """
        self.api_key = random_id()
        super().__init__(
            [
                *(f"--{name.replace('_', '-')}={value}" for name, value in DEFAULTS.items()),
                *flags,
                *("--host=127.0.0.1", "--port=0", "--no-page"),
            ],
            environment={API_KEY_VARIABLE: self.api_key},
            relays_errors=False,
        )

    def address(self) -> str:
        """Return the server's URL, once it is ready. Raises ConfigError if it cannot be asked with the key,
        because an option file has settings of a server for others.
        """
        endpoints = Endpoints(self.run_dir)
        config = LaunchFile.read(endpoints.config_file).config
        for name in OTHERS_SETTINGS:
            if getattr(config, name) not in ("", self.api_key):
                raise ConfigError(f"{name}: {OTHERS_ADVICE}")
        return config.http_url(msgspec.json.decode(self._state_file.read_bytes(), type=_Port).port)


def _make_run_dir() -> Path:
    """Make the run directory where temporary files are or, if that path is too long for the names of sockets,
    as that of a job's own directory may be, in /tmp.
    """
    fits = len(os.fsencode(tempfile.gettempdir())) + RUN_DIR_BYTES <= MAX_RUN_DIR_BYTES
    return Path(tempfile.mkdtemp(prefix=RUN_DIR_PREFIX, dir=None if fits else "/tmp"))


def _relay(source: BinaryIO, last_lines: deque[str], relays_errors: bool) -> None:
    with source:
        for line in source:
            text = line.decode(errors="replace").rstrip("\n")
            last_lines.append(text)
            if relays_errors or not text.startswith(ERROR_PREFIX):
                print(text, file=sys.stderr, flush=True)


def _reason_in(line: str) -> str:
    """Return what a line says of the launcher's end; empty if it says nothing."""
    if line.startswith(ERROR_PREFIX):
        return line.removeprefix(ERROR_PREFIX)
    if not line.startswith("{"):
        return ""
    try:
        logged = msgspec.json.decode(line, type=_LogLine)
    except msgspec.DecodeError:
        return ""
    return logged.message if (logged.level, logged.process) == ("error", "launcher") else ""
