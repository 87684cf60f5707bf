"""Child processes that try guides, as the grammar process sees them: a nursery that forks them, and the
children.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from grammar_proc.compile_child import LENGTH, PID, frame
from runtime.base.environment import child_environment
from runtime.wire.guide import Guide

ENTRY = (sys.executable, "-P", "-m", "runtime.launcher.child")
OOM_SCORE = 500
READ_BYTES = 1 << 20
CLOSE_S = 0.2


class Nursery:
    """The process that has read the vocabulary and forks children. It is started when it is first needed, and
    again if it has ended.
    """

    def __init__(self, tokenizer: str, backend: str) -> None:
        """`tokenizer` is the directory of a tokenizer."""
        self._arguments = (tokenizer, backend)
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def child(self) -> CompileChild:
        """Ask for a child. The child reports when it is ready; if it cannot start, its socket ends."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._send(theirs)
            except OSError:  # it has ended
                self.close()
                self._send(theirs)
        return CompileChild(ours)

    def _send(self, theirs: socket.socket) -> None:
        if self._process is None or self._control is None:
            self._control, self._process = self._started()
        socket.send_fds(self._control, [b"\1"], [theirs.fileno()])

    def _started(self) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                # It ends with this process, and is killed before it when memory is short.
                [*ENTRY, str(os.getpid()), str(OOM_SCORE), "grammar_proc.compile_child", *self._arguments],
                stdin=theirs.fileno(),
                env=child_environment(),
            )
        return ours, process

    def close(self) -> None:
        """End the nursery process, and with it its children."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(CLOSE_S)
            self._process = None


class CompileChild:
    """Child process that compiles guides. It is ready once it has reported its process id."""

    def __init__(self, link: socket.socket) -> None:
        link.setblocking(False)
        self.pid = 0
        """Process id; 0: not ready yet."""
        self.is_demoted = False
        self.key: bytes | None = None
        """Key of the guide that it tries."""
        self.guide: Guide | None = None
        self.tenant = ""
        """Tenant of that guide."""
        self.is_wanted = True
        """True if a request waits for that guide."""
        self.since = time.monotonic()
        """Time at which it began with the guide or was requested, in seconds of time.monotonic()."""
        self.charged_s = 0.0
        """CPU time of its guide that was charged to the credit that all guides share."""
        self._link = link
        self._pidfd = -1
        self._to_send = b""
        self._received = bytearray()
        self._cpu_before_s = 0.0

    def fileno(self) -> int:
        return self._link.fileno()

    @property
    def is_ready(self) -> bool:
        return self.pid != 0

    @property
    def cpu_s(self) -> float:
        """Return the CPU seconds that it has spent on its guide."""
        return _cpu_s(self.pid) - self._cpu_before_s

    def give(self, key: bytes, guide: Guide, tenant: str, now: float) -> None:
        self.key, self.guide, self.tenant = key, guide, tenant
        self.is_wanted, self.since, self.charged_s = True, now, 0.0
        self._cpu_before_s = _cpu_s(self.pid)
        self._to_send = frame(msgspec.msgpack.encode(guide))
        self.pump()

    def pump(self) -> None:
        """Send as much of the pending data as the socket accepts."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while self._to_send:
                self._to_send = self._to_send[self._link.send(self._to_send) :]

    def answer(self) -> bytes | None:
        """Return the next frame that has arrived; None: none yet. Raises EOFError if no more will come."""
        try:
            while data := self._link.recv(READ_BYTES):
                self._received += data
            raise EOFError
        except BlockingIOError:
            pass
        except ConnectionResetError:
            raise EOFError from None
        if len(self._received) < LENGTH.size:
            return None
        end = LENGTH.size + LENGTH.unpack_from(self._received)[0]
        if len(self._received) < end:
            return None
        data = bytes(self._received[LENGTH.size : end])
        del self._received[:end]
        return data

    def meet(self, data: bytes) -> None:
        """Read the child's first frame, its process id. Raises EOFError if it has ended since."""
        (pid,) = PID.unpack(data)
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            raise EOFError from None
        self.pid = pid

    def demote(self) -> None:
        """Let the child run only while no other process needs the processor (SCHED_IDLE). Without privileges
        this cannot be undone.
        """
        self.is_demoted = True
        if not self.has_ended:
            with contextlib.suppress(OSError):
                os.sched_setscheduler(self.pid, os.SCHED_IDLE, os.sched_param(0))

    @property
    def has_ended(self) -> bool:
        """Return True if the process has ended, so that its memory is, or soon will be, given back."""
        return self._pidfd < 0 or bool(select.select([self._pidfd], [], [], 0)[0])

    def kill(self) -> None:
        """Kill the child without waiting: at the lowest priority its memory may take a minute to be given
        back.
        """
        self._link.close()
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def forget(self) -> None:
        """Release the handle of the child, which has ended."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def _cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process; 0.0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
