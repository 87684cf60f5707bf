"""Strangers: detection of peers that connected to node 0's port for agents with a wrong key.

ZMQ drops them before any message is read, and its socket monitor reports them without an address. This side
of such a connection closes first, so the kernel lists it with the peer's address for another minute. Peers
that do not speak CURVE, such as port scanners, are ignored.
"""

from __future__ import annotations

import socket
import struct
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq

CONNECTIONS = Path("/proc/net/tcp")
CLOSED_HERE_STATES = ("04", "05", "06", "0B")
"""TCP states (of /proc/net/tcp) of connections that this side closed first."""
LISTED_S = 0.5
"""Longest time from ZMQ's report of an attempt, just before it closes the connection, until the kernel lists
the connection as closed here.
"""
FAILURES = frozenset(
    {
        zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
        zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
        zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    }
)


class Strangers:
    def __init__(self, listener: zmq.Socket[Any], host: str, port: int) -> None:
        """Watch a socket that is about to listen at this address."""
        self._monitor = listener.get_monitor_socket(sum(FAILURES))
        self._local = f"{_as_listed(host)}:{port:04X}"
        self._seen: set[str] = set()
        self._num_waiting = 0
        """Number of attempts whose address the kernel did not list yet."""
        self._wait_until = 0.0
        self._knocks: Counter[str] = Counter()
        """Number of attempts by address; the empty address counts those that the kernel never listed."""

    def num_knocks(self, address: str) -> int:
        """Return how often a peer with this address may have used a wrong key."""
        return self._knocks[address] + (self._knocks[""] if address else 0)

    def look(self) -> list[str]:
        """Return the addresses from which a wrong key was used since the last call. For an attempt that the
        kernel does not list it is the address with the most attempts, or an empty one. Call it again soon
        for attempts that are not listed yet.
        """
        # Imported here, because it would bring zmq's asyncio parts into the launcher.
        from zmq.utils.monitor import recv_monitor_message

        was_waiting, num_knocks, num_failed = self._num_waiting > 0, self._num_waiting, 0
        now = time.monotonic()
        while self._monitor.poll(0):
            told = recv_monitor_message(self._monitor)
            num_failed += told["event"] in FAILURES
            num_knocks += _is_other_key(told["event"], told["value"])
        if not (num_failed or was_waiting):
            return []
        new = self._closed() - self._seen
        self._seen |= new
        if not was_waiting:
            self._wait_until = now + LISTED_S
        self._num_waiting = 0 if new or now >= self._wait_until else num_knocks
        if not num_knocks or self._num_waiting:
            return []
        came = Counter(map(_as_written, new)) or Counter({"": num_knocks})
        for address, count in came.items():
            self._knocks[address] += min(count, num_knocks)
        if not new and (listed := self._knocks.keys() - {""}):
            return [max(listed, key=self._knocks.__getitem__)]
        return sorted(came)

    def _closed(self) -> set[str]:
        """Return the peer addresses of connections that this side has closed."""
        rows: list[list[str]] = []
        with suppress(OSError):
            rows = [line.split()[1:4] for line in CONNECTIONS.read_text().splitlines()[1:]]
        return {peer for local, peer, state in rows if local == self._local and state in CLOSED_HERE_STATES}


def _is_other_key(event: int, value: int) -> bool:
    """Return True if a failed handshake had a wrong key. Returns False for a peer without any key, such as a
    scanner.
    """
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        return value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC
    return event == zmq.EVENT_HANDSHAKE_FAILED_AUTH


def _as_listed(host: str) -> str:
    (number,) = struct.unpack("=I", socket.inet_aton(host))
    return f"{number:08X}"


def _as_written(peer: str) -> str:
    return socket.inet_ntoa(struct.pack("=I", int(peer.partition(":")[0], 16)))
