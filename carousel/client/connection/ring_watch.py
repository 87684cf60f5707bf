"""RingWatch: state of the runtime behind a client, and when it is gone. It uses the status page and the
launcher's process where these can be seen, and the ring's own messages elsewhere.
"""

from __future__ import annotations

import os
import select
from typing import Protocol

import msgspec

from runtime.base.errors import RingClosed
from runtime.ring.endpoints import Endpoints
from runtime.ring.ring_status import ring_status
from runtime.ring.run_dir import is_held
from runtime.wire.status_page import RingStatus, StatusPage

GONE = {"failed": "it has failed", "absent": "it has been stopped"}
"""Meaning of the launcher's final states."""


class RingWatch(Protocol):
    def why_gone(self) -> str:
        """Return the reason why the ring is gone for good; empty if it is not."""

    def hear(self, status: RingStatus) -> None:
        """Take a status message of the ring."""

    def status(self) -> RingStatus | None:
        """Return the present state; None while it is unknown."""

    def close(self) -> None: ...


class PageWatch:
    """Watch on a ring on this machine. The ring lives as long as its launcher's process. A launcher that is
    stopped replaces no process meanwhile, but the others continue to serve.
    """

    def __init__(self, endpoints: Endpoints) -> None:
        """Open the status page. Raises RingClosed when there is none."""
        self._run_dir = endpoints.run_dir
        self._state_file = endpoints.state_file
        try:
            self._page = StatusPage(endpoints.status_file)
        except (OSError, ValueError) as error:
            raise RingClosed(f"there is no runtime of this version at {self._run_dir}: {error}") from None
        self._pidfd = -1

    def why_gone(self) -> str:
        launcher = self._page.read("launcher")
        if launcher.pid and launcher.state in GONE:
            return GONE[launcher.state] + self._last_words()
        return "its launcher is dead" if self._has_exited(launcher.pid) else ""

    def hear(self, status: RingStatus) -> None:
        """Do nothing: the page says the same, and sooner."""

    def status(self) -> RingStatus:
        return ring_status(self._page)

    def _last_words(self) -> str:
        """Return which process failed and why, as the launcher recorded it; empty if none did."""
        try:
            error = msgspec.json.decode(self._state_file.read_bytes(), type=_LauncherState).error
        except (OSError, msgspec.MsgspecError):
            return ""
        return error and f": {error}"

    def _has_exited(self, pid: int) -> bool:
        """Return True if the process has ended. Uses a pidfd, for which a zombie counts as ended, and which
        can never come to mean another process. pid: 0 between the creation of the page and the launcher's
        first heartbeat.
        """
        if self._pidfd < 0:
            if pid:
                try:
                    self._pidfd = os.pidfd_open(pid)
                except ProcessLookupError:
                    return True
            # Checked after the pidfd is open: a launcher that holds the lock now is the process that this
            # descriptor refers to.
            if not is_held(self._run_dir):
                return True
            if not pid:
                return False
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        return bool(poller.poll(0))

    def close(self) -> None:
        self._page.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


class _LauncherState(msgspec.Struct):
    """Fields of state.json that are read here."""

    error: str = ""


class RemoteWatch:
    """Watch on a ring that is only known by its messages. The connection notices its silence."""

    def __init__(self) -> None:
        self._status: RingStatus | None = None

    def why_gone(self) -> str:
        return "" if self._status is None else GONE.get(self._status.state, "")

    def hear(self, status: RingStatus) -> None:
        self._status = status

    def status(self) -> RingStatus | None:
        return self._status

    def close(self) -> None:
        """Do nothing: the watch holds no resources."""
