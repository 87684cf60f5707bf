"""Strangers: those that have come to node 0's port for agents with another key than the nodes have.

ZMQ drops them before a message is read, and tells it at the socket's monitor without an address. Our end of
such a connection is the one that closes first, so the kernel still lists it, with the address of the other
end, for a minute.

Who speaks no CURVE, such as a scanner of ports, is none of them.
"""

from __future__ import annotations

import socket
import struct
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq

CONNECTIONS = Path("/proc/net/tcp")
CLOSED_HERE_STATES = ("04", "05", "06", "0B")
"""States of connections that our end has closed first: those in which it waits for the other end or for stray
packets.
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
        """Knocks of which the kernel did not say from where when it was asked first: we hear of one a moment
        before it closes the connection.
        """
        self._knocks: Counter[str] = Counter()
        """By address; an empty one where the kernel has not said it."""

    def num_knocks(self, address: str) -> int:
        """Return how often somebody may have come from an address with another key."""
        return self._knocks[address] + (self._knocks[""] if address else 0)

    def look(self) -> list[str]:
        """Return the addresses from which another key has come since the last call. Call again soon: what the
        kernel does not list yet is told then.
        """
        # Imported here: it brings zmq's asyncio parts into the launcher otherwise.
        from zmq.utils.monitor import recv_monitor_message

        was_waiting, num_knocks, num_failed = self._num_waiting > 0, self._num_waiting, 0
        while self._monitor.poll(0):
            told = recv_monitor_message(self._monitor)
            num_failed += told["event"] in FAILURES
            num_knocks += _is_other_key(told["event"], told["value"])
        if not (num_failed or was_waiting):
            return []
        new = self._closed() - self._seen
        self._seen |= new
        self._num_waiting = 0 if new or was_waiting else num_knocks
        if not num_knocks or self._num_waiting:
            return []
        came = Counter(map(_as_written, new)) or Counter({"": num_knocks})
        for address, count in came.items():
            self._knocks[address] += min(count, num_knocks)
        return sorted(came)

    def _closed(self) -> set[str]:
        """Return the other ends, as the kernel lists them, of connections that our end has closed."""
        rows: list[list[str]] = []
        with suppress(OSError):
            rows = [line.split()[1:4] for line in CONNECTIONS.read_text().splitlines()[1:]]
        return {peer for local, peer, state in rows if local == self._local and state in CLOSED_HERE_STATES}


def _is_other_key(event: int, value: int) -> bool:
    """Tell whether a failed handshake is that of a key. One without any, such as a scanner's, is not."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        return value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC
    return event == zmq.EVENT_HANDSHAKE_FAILED_AUTH


def _as_listed(host: str) -> str:
    (number,) = struct.unpack("=I", socket.inet_aton(host))
    return f"{number:08X}"


def _as_written(peer: str) -> str:
    return socket.inet_ntoa(struct.pack("=I", int(peer.partition(":")[0], 16)))
