"""LaunchRecords: writes state.json and events.jsonl of a launch in a thread, so that a disk which hangs
delays nothing else.

Events are one JSON object a line, written in order, and before any later state. If several states wait, only
the newest is written. Records contain names, numbers and reasons only, and nothing of a request.
"""

from __future__ import annotations

import logging
import os
import threading
import time

import msgspec

from runtime.ring.endpoints import Endpoints
from runtime.ring.launch_state import LaunchState, write_atomically

logger = logging.getLogger(__name__)

MAX_EVENTS = 4096
"""Maximum number of events that wait for the disk. Further ones are dropped and counted."""
MAX_WAIT_S = 2.0
"""Maximum number of seconds that the launcher waits for the disk at a time."""


class LaunchRecords:
    def __init__(self, endpoints: Endpoints) -> None:
        """Create events.jsonl and start the thread. Raises OSError if the file cannot be created."""
        self._state_file = endpoints.state_file
        self._fd = os.open(
            endpoints.events_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        self._changed = threading.Condition()
        self._events: list[bytes] = []
        self._num_lost = 0
        self._state = b""
        self._is_writing = False
        self._is_late = False
        """True while the disk has not caught up after a wait that timed out."""
        self._is_closed = False
        self._says_failures = True
        self._thread = threading.Thread(target=self._run, name="carousel-records", daemon=True)
        self._thread.start()

    def event(self, event: str, **fields: str | int | float | None) -> None:
        """Append an event. Fields that are None are left out. If the disk is full, lines are lost and the
        server continues.
        """
        line = _event_line(event, **fields)
        with self._changed:
            if len(self._events) < MAX_EVENTS:
                self._events.append(line)
            else:
                self._num_lost += 1
            self._changed.notify_all()

    def state(self, state: LaunchState) -> None:
        """Replace state.json by this state of the launch."""
        data = msgspec.json.format(msgspec.json.encode(state))
        with self._changed:
            self._state = data
            self._changed.notify_all()

    def wait_written(self) -> bool:
        """Wait until everything is written, at most MAX_WAIT_S. Returns True if it is. After a timeout it
        does not wait again until the disk has caught up.
        """
        with self._changed:
            timeout_s = 0.0 if self._is_late else MAX_WAIT_S
            is_written = self._changed.wait_for(self._is_idle, timeout_s)
            self._is_late = not is_written
            return is_written

    def close(self) -> bool:
        """Write the remaining records and end the thread. Returns True if that was done within MAX_WAIT_S.
        Otherwise the thread ends when the disk lets it, or with the process.
        """
        is_written = self.wait_written()
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(MAX_WAIT_S if is_written else 0.0)
        return not self._thread.is_alive()

    def _is_idle(self) -> bool:
        return not (self._is_writing or self._events or self._state)

    # -- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                self._is_late = self._is_late and not self._is_idle()
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._is_closed or not self._is_idle())
                if self._is_idle():
                    break
                self._is_writing = True
                events, self._events = self._events, []
                num_lost, self._num_lost = self._num_lost, 0
                state, self._state = self._state, b""
            if num_lost:
                events.append(_event_line("lost", events=num_lost))
            self._append(events)
            if state:
                self._replace_state(state)
        os.close(self._fd)

    def _append(self, lines: list[bytes]) -> None:
        try:
            for line in lines:
                os.write(self._fd, line)
        except OSError as error:
            if self._says_failures:
                logger.warning("events are not written any more: %s", error)
            self._says_failures = False

    def _replace_state(self, data: bytes) -> None:
        try:
            write_atomically(self._state_file, data)
        except OSError as error:
            # Readers of the file may miss something, but requests are served all the same.
            logger.warning("state.json is not up to date: %s", error)


def _event_line(event: str, **fields: str | int | float | None) -> bytes:
    kept = {name: value for name, value in fields.items() if value is not None}
    return msgspec.json.encode({"time": round(time.time(), 3), "event": event, **kept}) + b"\n"
