"""Link: whether a socket's connection stands, where nothing but the connection itself says so."""

from __future__ import annotations

from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message


class Link:
    """Of one socket. Used by the I/O thread alone."""

    def __init__(self, socket: zmq.Socket[Any]) -> None:
        self._socket = socket
        self._events = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._is_lost = False
        self._was_lost = False

    @property
    def is_lost(self) -> bool:
        """It stood once and does not now."""
        self._look()
        return self._is_lost

    @property
    def was_lost(self) -> bool:
        """It has broken since it was forgiven, even if it stands again: ZMQ connects anew by itself, but the
        other end takes that for somebody else.
        """
        self._look()
        return self._was_lost

    def forgive(self) -> None:
        """What was lost so far does not count."""
        self._look()
        self._was_lost = False

    def _look(self) -> None:
        while self._events.poll(0):
            event = recv_monitor_message(self._events)["event"]
            self._is_lost = event == zmq.EVENT_DISCONNECTED
            self._was_lost = self._was_lost or self._is_lost

    def close(self) -> None:
        self._socket.disable_monitor()
        self._events.close(linger=0)
