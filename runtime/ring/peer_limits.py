"""PeerLimits: ends connections over TCP that fill more of the process than they may.

ZMQ limits the length of a frame and the number of messages that it holds of a peer. It does not limit the
frames of a message, and holds all of them until the last one has come. So a thread asks the kernel how much
each connection has brought since a message of it was last read. Knows no message.

Nor does ZMQ limit the connections whose handshakes have not ended, which take 14 KB and a descriptor each, or
tell frames of a handshake, which are short, from those of messages. The kernel says how many bytes a peer has
got, too, which are few until its key is accepted.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

logger = logging.getLogger(__name__)

CHECK_S = 0.1
CROWDED_CHECK_S = 0.02
"""Seconds between two checks while a handshake goes on: a stranger may send a gigabyte in a second."""
LOG_S = 60.0
MIN_KERNEL_BYTES = 32 << 20
"""Bytes of a connection that the kernel may hold, and that framing adds, at least."""
TCP_RMEM = Path("/proc/sys/net/ipv4/tcp_rmem")
"""Least, usual and most bytes of a connection that the kernel holds."""
IDLE_BYTES_PER_S = 20.0
"""Bytes that a connection may bring without a message. Heartbeats are 8 a second."""
MAX_ALL_BYTES = 1 << 30
"""Bytes of all connections of a process together."""
MAX_STRANGERS = 512
"""Maximum number of connections whose handshakes have not ended. The oldest give way to new ones."""
MAX_STRANGER_BYTES = 4 << 10
"""Bytes that a connection may bring before its handshake has ended, which takes less than 1 KiB."""
MAX_HANDSHAKE_SENT_BYTES = 256
"""Bytes that a peer gets at most without an accepted key: greeting (64), WELCOME (170) and ERROR (12). READY,
without which it cannot send a message, has another 52 at least.
"""
# struct tcp_info of Linux: tcpi_bytes_acked, tcpi_bytes_received.
_TRAFFIC, _INFO_BYTES = struct.Struct("<120xQQ"), 136
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED
_SOURCE, _USER_ID = "__fd", "User-Id"


@dataclass(slots=True, eq=False)
class Peer:
    """A connection."""

    max_bytes: int
    num_bytes: float = 0.0
    """Bytes that it has brought since a message of it was last read, without those of heartbeats."""
    read_at: float = 0.0
    """Bytes that it had brought then, and those of heartbeats since."""
    key: str = ""
    """Public key of the peer; empty until a message of it is read."""


class PeerLimits:
    """Limits of the connections of a process, by their file descriptors."""

    def __init__(self, context: zmq.Context[Any], max_all_bytes: int = MAX_ALL_BYTES) -> None:
        self._context = context
        self._max_all_bytes = max_all_bytes
        self._peers: dict[int, Peer] = {}
        self._read: dict[int, str] = {}
        """Connections of which a message was read since the last check, with their keys."""
        self._watched: list[zmq.Socket[Any]] = []
        self._monitors: list[tuple[zmq.Socket[Any], int]] = []
        self._logged_at = -LOG_S
        self._checked_at = time.monotonic()
        self._has_strangers = False
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, socket: zmq.Socket[Any]) -> None:
        """Limit what comes to a socket, which is bound after this: one connection may fill as many messages
        of one frame as ZMQ holds, and one more.
        """
        address = f"inproc://limits-{id(socket)}"
        socket.monitor(address, _EVENTS)
        self._watched.append(socket)
        monitor = self._context.socket(zmq.PAIR)
        monitor.setsockopt(zmq.LINGER, 0)
        monitor.connect(address)
        num_messages, frame_bytes = (int(socket.getsockopt(each)) for each in (zmq.RCVHWM, zmq.MAXMSGSIZE))
        max_bytes = (num_messages + 1) * frame_bytes + max_kernel_bytes()
        self._monitors.append((monitor, max_bytes))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="carousel-peers", daemon=True)
            self._thread.start()

    def note_read(self, frame: zmq.Frame) -> None:
        """Record that a message was read. frame: one of it."""
        with contextlib.suppress(zmq.ZMQError):
            self._read[int(frame.get(_SOURCE))] = str(frame.get(_USER_ID))

    def close(self) -> None:
        """End the thread. Call it in the thread of the sockets, before the context is destroyed."""
        for watched in self._watched:
            if not watched.closed:
                watched.disable_monitor()  # ZMQ would wait for a monitor that nobody reads
        self._ends.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._ends.wait(CROWDED_CHECK_S if self._has_strangers else 0):
            if not self._has_strangers:
                self._wait_for_events()
            self._check(time.monotonic())
        for monitor, _ in self._monitors:
            monitor.close()

    def _wait_for_events(self) -> None:
        poller = zmq.Poller()
        for monitor, _ in list(self._monitors):
            poller.register(monitor, zmq.POLLIN)
        poller.poll(int(1000 * CHECK_S))

    def _check(self, now_s: float) -> None:
        idle_bytes = IDLE_BYTES_PER_S * (now_s - self._checked_at)
        self._checked_at = now_s
        for monitor, max_bytes in list(self._monitors):
            self._take_events(monitor, max_bytes)
        read, self._read = self._read, {}
        total = 0.0
        strangers: list[int] = []
        of_key: defaultdict[str, float] = defaultdict(float)
        for number, peer in list(self._peers.items()):
            traffic = _traffic(number)
            if traffic is None:
                del self._peers[number]
                continue
            num_acked, received = traffic
            if number in read:
                peer.key, peer.read_at = read[number], received
            peer.read_at = min(peer.read_at + idle_bytes, received)
            peer.num_bytes = received - peer.read_at
            if num_acked <= MAX_HANDSHAKE_SENT_BYTES:
                if received > MAX_STRANGER_BYTES:
                    self._end(number, "more bytes than a handshake has")
                else:
                    strangers.append(number)
                continue
            if peer.num_bytes > peer.max_bytes:
                self._end(number, "too many bytes without a message")
                continue
            total += peer.num_bytes
            of_key[peer.key] += peer.num_bytes
        while total > self._max_all_bytes:
            key = max(of_key, key=lambda each: of_key[each])
            own = {number: peer for number, peer in self._peers.items() if peer.key == key}
            number = max(own, key=lambda each: own[each].num_bytes)
            total -= own[number].num_bytes
            of_key[key] -= own[number].num_bytes
            self._end(number, "the most bytes of all without a message")
        self._has_strangers = bool(strangers)
        for number in strangers[: max(0, len(strangers) - MAX_STRANGERS)]:
            self._end(number, "no complete handshake, while many others had begun one")

    def _take_events(self, monitor: zmq.Socket[Any], max_bytes: int) -> None:
        while monitor.poll(0):
            event = recv_monitor_message(monitor)
            number = int(event["value"])
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._peers[number] = Peer(max_bytes)
            elif event["event"] != zmq.EVENT_MONITOR_STOPPED:
                self._peers.pop(number, None)

    def _end(self, number: int, brought: str) -> None:
        """Shut a connection down, so that ZMQ closes it and drops the messages that are not complete.
        brought: description, for the log, of what it has sent.
        """
        del self._peers[number]
        if time.monotonic() - self._logged_at >= LOG_S:
            self._logged_at = time.monotonic()
            logger.warning("a connection is closed that brought %s", brought)
        with contextlib.suppress(OSError):  # it may be closed by now
            connection = socket.socket(fileno=number)
            try:
                connection.shutdown(socket.SHUT_RDWR)
            finally:
                connection.detach()


def max_kernel_bytes() -> int:
    """Return how many bytes of a connection the kernel may hold."""
    try:
        return max(MIN_KERNEL_BYTES, int(TCP_RMEM.read_text().split()[2]))
    except (OSError, ValueError, IndexError):
        return MIN_KERNEL_BYTES


def _traffic(number: int) -> tuple[int, int] | None:
    """Return how many bytes a connection's peer has got and has sent; None if it is closed or the kernel does
    not say.
    """
    try:
        connection = socket.socket(fileno=number)
    except OSError:
        return None
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    except OSError:
        return None
    finally:
        connection.detach()
    return _TRAFFIC.unpack(info) if len(info) == _INFO_BYTES else None
