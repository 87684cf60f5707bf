"""LocalHost: processes of this machine. They are tracked by pidfds, so the kernel reports a death at once,
and no signal can reach another process that has got the same pid.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from runtime.base.environment import child_environment
from runtime.base.errors import ConfigError, StartError
from runtime.launcher.hosts.host import ENGINE, Child, ProcessPlace
from runtime.ring.liveness import is_stopped

MODULES = {
    "worker": "model_worker.main",
    "scheduler": "scheduler_proc.main",
    "grammar": "grammar_proc.main",
    "detokenizer": "detokenizer_proc.main",
    "tokenizer": "tokenizer_proc.main",
    "api": "carousel.server",
}
ENGINE_OOM_SCORE = 300
OTHERS_OOM_SCORE = 100
"""Added to the launcher's oom_score_adj for the other processes, in thousandths of memory. When memory is
short, the kernel kills the engine first, which uses most of it and whose requests are resumed, and the
launcher last, whose end would end all processes.
"""


class WatchedProcess:
    """Any process of the machine, not only a child. Its end is seen even before its parent has reaped it, and
    after its number was given to another process.
    """

    def __init__(self, pid: int, setting: str) -> None:
        """Watch the process `pid`, which `setting` names; 0: none. Raises ConfigError when there is none of
        that number.
        """
        self._poll = select.poll()
        if not pid:
            return
        try:
            self._poll.register(os.pidfd_open(pid), select.POLLIN)
        except (OSError, OverflowError):
            raise ConfigError(f"{setting}: there is no process {pid}; leave it out, or name one") from None

    def has_ended(self) -> bool:
        return bool(self._poll.poll(0))


@dataclass(eq=False)
class LocalChild(Child):
    """A process of this machine."""

    process: subprocess.Popen[bytes]
    pidfd: int
    poller: zmq.Poller | None = None
    """Poller that has the pidfd of the process registered."""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_stopped(self) -> bool:
        """True if a signal has stopped it."""
        return is_stopped(self.pid)

    def kill(self) -> None:
        """Kill the process and what it has started. Its end is then reported like any other."""
        self._signal(signal.SIGKILL)
        self._kill_group()

    def terminate(self) -> None:
        """Ask the process to end."""
        self._signal(signal.SIGTERM)

    def has_ended(self, timeout_s: float) -> bool:
        """Wait up to timeout_s for the end of the process. Returns True if it has ended."""
        return self._wait(timeout_s * 1000)

    def is_among(self, fired: Collection[Any]) -> bool:
        """Return True if these results of a poll report its end."""
        return self.pidfd in fired

    def poll(self) -> int | None:
        """Return the exit code of the process, or minus the signal; None while it runs."""
        return self._collect() if self._wait(0) else None

    def reap(self) -> int:
        """Wait for the end of the process and free its resources. Returns the same as `poll`."""
        self._wait(None)
        code = self._collect()
        if self.poller is not None:
            self.poller.unregister(self.pidfd)
        os.close(self.pidfd)
        return code

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def _wait(self, timeout_ms: float | None) -> bool:
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(timeout_ms))

    def _collect(self) -> int:
        """Take the exit code of a process that has ended, and end what it has left running."""
        self._kill_group()
        return self.process.wait()

    def _kill_group(self) -> None:
        """Kill the processes that it has started, such as compilers: its process group. The group's number
        cannot belong to others before the exit code is taken.
        """
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)


class LocalHost:
    def __init__(
        self, run_dir: Path, poller: zmq.Poller, listeners: Mapping[str, socket.socket | None]
    ) -> None:
        """poller: gets the pidfds. listeners: listening sockets that processes inherit, by role; only rank 0
        inherits that of the workers.
        """
        self._run_dir = run_dir
        self._poller = poller
        self._listeners = listeners

    def start(self, place: ProcessPlace, epoch: int) -> LocalChild:
        """Start a process in a place. Raises StartError if that fails."""
        listener = self._listeners.get(place.role)
        is_heir = listener is not None and (place.role != "worker" or place.index == 0)
        fds = (listener.fileno(),) if listener is not None and is_heir else ()
        numbers = map(str, (place.index, epoch, *fds))
        oom_score = ENGINE_OOM_SCORE if place.unit == ENGINE else OTHERS_OOM_SCORE
        arguments = [str(os.getpid()), str(oom_score), MODULES[place.role], str(self._run_dir), *numbers]
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "runtime.launcher.child", *arguments],
                stdin=subprocess.DEVNULL,
                # A Ctrl-C in the terminal reaches the launcher alone, which then decides. All stay in one
                # session: between sessions the kernel may share cores without a look at priorities.
                process_group=0,
                pass_fds=fds,
                env=child_environment(),
            )
        except OSError as error:
            raise StartError(f"{place.name} cannot be started: {error}") from None
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError as error:  # this process has as many descriptors as it may have
            process.kill()
            process.wait()
            raise StartError(f"{place.name} cannot be watched: {error}") from None
        child = LocalChild(place, epoch, process, pidfd, self._poller)
        self._poller.register(child.pidfd, zmq.POLLIN)
        return child
