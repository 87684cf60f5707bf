"""RingWatch: says when the runtime behind a client is gone, by the launcher's slot and process."""

from __future__ import annotations

import os
import select

from runtime.endpoints import Endpoints
from runtime.errors import RingClosed
from runtime.status_page import StatusPage

SILENCE_S = 15.0
"""As long as both ends of client_out wait for a sign of life before they give each other up."""


class RingWatch:
    def __init__(self, endpoints: Endpoints) -> None:
        """Open the status page. Raises RingClosed when there is none."""
        self._run_dir = endpoints.run_dir
        try:
            self._page = StatusPage(endpoints.status_file)
        except (OSError, ValueError) as error:
            raise RingClosed(f"there is no runtime of this version at {self._run_dir}: {error}") from None
        self._pidfd = -1

    def why_gone(self) -> str:
        """Why the ring is gone for good; empty while it is not."""
        launcher = self._page.read("launcher")
        if launcher.pid == 0:
            # The page is made just before the launcher's first heartbeat; whoever waits has a time limit of
            # his own.
            return ""
        if launcher.state in ("failed", "absent"):
            return "it has failed" if launcher.state == "failed" else "it has been stopped"
        if self._has_exited(launcher.pid):
            return "its launcher is dead"
        if launcher.age_s() > SILENCE_S:
            return f"its launcher has given no sign of life for {SILENCE_S:.0f} s"
        return ""

    def _has_exited(self, pid: int) -> bool:
        """By a pidfd: it sees a zombie as dead and can never mean another process."""
        if self._pidfd < 0:
            try:
                self._pidfd = os.pidfd_open(pid)
            except ProcessLookupError:
                return True
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        return bool(poller.poll(0))

    def close(self) -> None:
        self._page.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
