"""Frame around the `main.py` of every process of the ring.

It owns the process title, signals, the slot on the status page, and the two messages to the launcher. An
error that ends a process is caught here and becomes a ProcessFailed message and an exit code, never a hang.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import zmq

from runtime.base.console import configure_logging
from runtime.base.errors import EXIT_CONFIG, EXIT_INTERNAL, EXIT_OK, CarouselError, StartError
from runtime.base.wake import Wake
from runtime.ring.endpoints import Endpoints
from runtime.settings.config import RuntimeConfig
from runtime.wire.messages import ProcessFailed, ProcessReady
from runtime.wire.status_page import ProcessStatus, StatusPage
from runtime.wire.transport import ZmqInbox, ZmqOutbox

logger = logging.getLogger(__name__)

# Three heartbeats fit into the second after which a silent process counts as stalled.
HEARTBEAT_S = 0.25
FAREWELL_LINGER_MS = 500
SECRET_BYTES = 32
FIRST_EPOCH = 1


class LaunchFile(msgspec.Struct, frozen=True):
    """config.json of a run directory: settings and other data that the launcher passes to its processes."""

    config: RuntimeConfig
    secret: bytes = msgspec.field(default_factory=lambda: os.urandom(SECRET_BYTES))
    """Key of digests that only the ring can compute, such as those of cache namespaces."""

    @staticmethod
    def read(path: Path) -> LaunchFile:
        return msgspec.json.decode(path.read_bytes(), type=LaunchFile)


class ProcessContext:
    """Everything that a process of the ring is given: settings, names, sockets, its slot of the status page,
    and the request to stop.
    """

    def __init__(
        self, role: str, run_dir: Path, index: int = 0, epoch: int = FIRST_EPOCH, listener_fd: int = -1
    ) -> None:
        launch = LaunchFile.read(Endpoints(run_dir).config_file)
        self.role = role
        self.index = index
        """Index of this process among those of its role."""
        self.name = process_name(role, index, launch.config)
        """Name of this process, for logs and errors."""
        self.config = launch.config
        self.epoch = epoch
        """Number of the restart that started this process; FIRST_EPOCH at the start of the launch. Each
        restart takes the next number for the processes that it starts.
        """
        self.secret = launch.secret
        self.endpoints = Endpoints(run_dir)
        self.listener_fd = listener_fd
        """Listening socket that the process inherits: for an API server that of HTTP, for rank 0 with several
        nodes the one where ranks meet; otherwise -1.
        """
        self.zmq: zmq.Context[Any] = zmq.Context()
        self.status = StatusPage(self.endpoints.status_file)
        self.stop = threading.Event()
        """Set by SIGTERM. The work loop ends at its next turn."""
        self.stop_wake = Wake()
        """Set together with `stop`, to end the poll in which the work loop waits."""
        self._launcher = ZmqOutbox(
            self.zmq, self.endpoints.launcher_in, self.epoch, linger_ms=FAREWELL_LINGER_MS
        )
        self.was_paused = self.status.read(role, index).is_paused
        """True if generation was paused when the predecessor of this process ended. It is shown from the
        start, so that it is not lost if this process ends before it is ready.
        """
        self.loaded = 0.0
        """Share of the weights that is loaded, in a process that loads some."""
        self._state = "loading"
        self._next_beat_at = 0.0
        self.beat(force=True)

    @property
    def is_launch_ending(self) -> bool:
        """True if the whole launch ends, not only this process. No successor will then take over
        its state.
        """
        return self.status.read("launcher").state in ("draining", "failed", "absent")

    def inbox(self, name: str, address: str) -> ZmqInbox:
        """Bind the socket that this process reads. name: its key in UNIONS."""
        return ZmqInbox(self.zmq, address, name, self.epoch)

    def wake(self) -> Wake:
        """Make a flag that a thread of this process sets to end the poll in which the work loop waits."""
        return Wake()

    def outbox(self, address: str) -> ZmqOutbox:
        """Connect to a socket that another process reads."""
        return ZmqOutbox(self.zmq, address, self.epoch)

    def ready(self, **info: int | float | str) -> None:
        """Report to the launcher, and through the status page to everybody, that this process can serve."""
        self._state = "ready"
        self.beat(force=True)
        self._launcher.send(ProcessReady(self.name, self.epoch, info))

    def beat(self, *, force: bool = False, **fields: Any) -> None:
        """Write the slot of this process if a heartbeat is due. Call it from the work loop, at least every
        HEARTBEAT_S.
        """
        now = time.monotonic()
        if force or self.is_beat_due(now):
            self._next_beat_at = now + HEARTBEAT_S / 2
            fields = {"is_paused": self.was_paused, "loaded": self.loaded, **fields}
            status = ProcessStatus(self.epoch, os.getpid(), self._state, time.monotonic_ns(), **fields)
            self.status.write(self.role, status, self.index)

    def is_beat_due(self, now: float) -> bool:
        """Return True if `beat` will write. For callers whose fields take time to gather."""
        return now >= self._next_beat_at

    def note_loaded(self, share: float) -> None:
        """Record the share of the weights that is loaded. The next heartbeat shows it."""
        self.loaded = share

    def failed(self, message: str, exit_code: int) -> None:
        """Show in the slot that this process has failed, and tell the launcher why. The other fields keep
        their last values, such as the sequence that ran alone, which the launcher needs to judge the failure.
        """
        self._state = "failed"
        last = self.status.read(self.role, self.index)
        self.status.write(self.role, last._replace(state=self._state), self.index)
        self._launcher.send(ProcessFailed(self.name, message, exit_code))

    def ask_to_stop(self) -> None:
        """Make the work loop end. May be called from a signal handler."""
        self.stop.set()
        self.stop_wake.set()

    def close(self) -> None:
        self._launcher.close()
        self.zmq.destroy(linger=FAREWELL_LINGER_MS)
        self.stop_wake.close()


def run_process(role: str, main: Callable[[ProcessContext], None]) -> NoReturn:
    """Run `main` as a process of `role`. Command line arguments: run directory, index within the role, epoch,
    and for the API server its listening socket.

    Ends the interpreter without its teardown, which threads of torch and ZMQ may delay for seconds.
    Everything that outlives this process (files, socket names) belongs to the launcher.
    """
    if len(sys.argv) < 2:
        print(f"This is the {role} process of a launch, which starts it: run `carousel`.", file=sys.stderr)
        sys.exit(EXIT_CONFIG)
    context = _enter(role, sys.argv[1:])
    code = EXIT_OK
    try:
        main(context)
    except Exception as error:
        code = error.exit_code if isinstance(error, StartError) else EXIT_INTERNAL
        if not isinstance(error, CarouselError):
            logger.exception("ended by an error")
        context.failed(f"{type(error).__name__}: {error}" if code == EXIT_INTERNAL else str(error), code)
    context.close()
    for stream in (sys.stdout, sys.stderr):
        # Output of a library; there may be no reader.
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def _enter(role: str, arguments: list[str]) -> ProcessContext:
    run_dir, numbers = Path(arguments[0]), [int(argument) for argument in arguments[1:]]
    context = ProcessContext(role, run_dir, *numbers)
    set_title(context.name)
    configure_logging(context.name, context.config.log_level, context.config.log_format)
    # Every connection of a client holds a file descriptor, and 1024 is a common default.
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    # The launcher decides what Ctrl-C means; it asks with SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: context.ask_to_stop())
    return context


def process_name(role: str, index: int, config: RuntimeConfig) -> str:
    """Return the name of a process: its role, and its index where there are several."""
    return f"{role}:{index}" if config.num_processes.get(role, 1) > 1 else role


def set_title(name: str) -> None:
    import setproctitle

    setproctitle.setproctitle(f"carousel:{name}")
