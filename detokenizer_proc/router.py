"""The socket to the clients: frames to and from peers, by routing id. Knows nothing of what is in a frame."""

from __future__ import annotations

import enum
from typing import Any, Protocol

import zmq

from runtime.transport import BadFrames, bind_private

# What a client has not read yet is kept by its streams, joined to one message, not in the socket: enough for
# the steps of a short stall is enough here.
MAX_UNREAD_MESSAGES = 64
MAX_FRAME_BYTES = 1 << 16


class Delivery(enum.Enum):
    """What became of a message."""

    SENT = enum.auto()
    FULL = enum.auto()
    """The peer does not read; nothing was sent, try again later."""
    GONE = enum.auto()
    """There is no such peer any more."""


class PeerChannel(Protocol):
    def drain(self, limit: int) -> list[tuple[bytes, bytes]]:
        """At most `limit` frames that have arrived, each with its sender's routing id. Never blocks."""

    def send(self, peer: bytes, frame: bytes) -> Delivery:
        """Send without blocking."""


class RouterChannel:
    """A ROUTER that assigns the routing ids itself and says so when it cannot deliver.

    NOTE: ROUTER_HANDOVER stays off: with it a peer could take over the routing id, and so the output, of
    another.
    """

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        self.bad_frames = BadFrames("client_out")
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.SNDHWM, MAX_UNREAD_MESSAGES)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        bind_private(self.socket, address)

    def drain(self, limit: int) -> list[tuple[bytes, bytes]]:
        frames: list[tuple[bytes, bytes]] = []
        for _ in range(limit):
            try:
                parts = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(parts) == 2:
                frames.append((parts[0], parts[1]))
            else:
                self.bad_frames.add(ValueError(f"{len(parts) - 1} frames where one was expected"))
        return frames

    def send(self, peer: bytes, frame: bytes) -> Delivery:
        try:
            self.socket.send_multipart((peer, frame), zmq.NOBLOCK)
        except zmq.Again:
            return Delivery.FULL
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return Delivery.GONE
            raise
        return Delivery.SENT

    def close(self) -> None:
        self.socket.close()
