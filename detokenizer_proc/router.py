"""Socket to the clients: frames to and from peers, by routing id. Knows nothing of the content of frames."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import zmq

from detokenizer_proc.raw_window import RawWindow
from runtime.ring.tenants import OWNER
from runtime.wire.transport import (
    MORE_FOLLOW,
    NOBLOCK,
    BadFrames,
    Frame,
    NoteRead,
    bind_private,
    can_read,
    key_of,
    skip_more,
)

# Messages of a client that the socket holds. Further unread output is kept, merged, by the client's streams,
# so the socket needs room only for the steps of a short stall.
MAX_UNREAD_MESSAGES = 64
MAX_FRAME_BYTES = 1 << 16
# Bytes of raw frames that the socket holds for a peer: enough to keep it busy between two turns of the loop.
MAX_UNREAD_RAW_BYTES = 64 << 20


class Delivery(enum.Enum):
    """Result of sending a message to a peer."""

    SENT = enum.auto()
    FULL = enum.auto()
    """The peer does not read. Nothing was sent; try again later."""
    GONE = enum.auto()
    """The peer no longer exists."""


class Arrival(NamedTuple):
    """A frame that has come from a peer."""

    peer: bytes
    """Routing id of the sender."""
    frame: bytes
    tenant: str
    """Tenant of the sender."""


class PeerChannel(Protocol):
    def drain(self, limit: int) -> list[Arrival]:
        """Return up to `limit` frames that have arrived. Never blocks."""

    def send(self, peer: bytes, frame: bytes, more: Sequence[Frame] = ()) -> Delivery:
        """Send a message and its raw frames without blocking."""

    def is_local(self, peer: bytes) -> bool:
        """Return True if the peer connected through the run directory, which only the launch's user
        can open.
        """


class RouterChannel:
    """ROUTER socket that assigns routing ids itself and reports when it cannot deliver.

    NOTE: ROUTER_HANDOVER stays off. With it a peer could take over the routing id, and so the output, of
    another.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        *,
        bind: Callable[[zmq.Socket[Any], str], None] = bind_private,
        tenant_of: Callable[[str], str] | None = None,
        note_read: NoteRead | None = None,
    ) -> None:
        """Bind the socket. bind: replaces `bind_private` where other users may connect. tenant_of: returns
        the tenant of a peer's key, or raises ValueError. note_read: called with the first frame of each
        message there.
        """
        self.bad_frames = BadFrames("client_out")
        self._tenant_of = tenant_of
        self._note_read = note_read
        self._window = RawWindow(MAX_UNREAD_RAW_BYTES)
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.SNDHWM, MAX_UNREAD_MESSAGES)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        bind(self.socket, address)

    def drain(self, limit: int) -> list[Arrival]:
        arrivals: list[Arrival] = []
        for _ in range(limit):
            # Mostly nothing more has come, and asking takes half as long as the error of a receive in vain.
            if not can_read(self.socket):
                break
            try:
                peer = self.socket.recv(NOBLOCK, copy=False)
            except zmq.Again:
                break
            frame = self.socket.recv(NOBLOCK) if self.socket.getsockopt(zmq.RCVMORE) else b""
            num_more = skip_more(self.socket)
            if self._note_read is not None:
                self._note_read(peer)
            try:
                if num_more:
                    raise ValueError(f"{num_more + 1} frames where one was expected")
                tenant = OWNER if self._tenant_of is None else self._tenant_of(key_of(peer))
            except ValueError as error:
                self.bad_frames.add(error)
            else:
                arrivals.append(Arrival(peer.bytes, frame, tenant))
        return arrivals

    def send(self, peer: bytes, frame: bytes, more: Sequence[Frame] = ()) -> Delivery:
        try:
            if more:
                return self._send_raw(peer, frame, more)
            self.socket.send(peer, MORE_FOLLOW)
            self.socket.send(frame, NOBLOCK)
        except zmq.Again:
            return Delivery.FULL
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return Delivery.GONE
            raise
        return Delivery.SENT

    def _send_raw(self, peer: bytes, frame: bytes, more: Sequence[Frame]) -> Delivery:
        if not self._window.is_open(peer):
            return Delivery.FULL
        # The last frame of a message is sent last, so tracking it tracks all.
        last = zmq.Frame(more[-1], track=True, copy=False)
        self.socket.send_multipart((peer, frame, *more[:-1], last), zmq.NOBLOCK, copy=False)
        self._window.add(peer, last.tracker, sum(memoryview(raw).nbytes for raw in more))
        return Delivery.SENT

    def is_local(self, peer: bytes) -> bool:
        return self._tenant_of is None

    def close(self) -> None:
        self.socket.close()


class JoinedChannels:
    """Several channels used as one. Two sockets may give their peers the same id, so a byte before the id
    names the socket.
    """

    def __init__(self, channels: Sequence[PeerChannel]) -> None:
        assert len(channels) <= 256
        self._channels = tuple(channels)

    def drain(self, limit: int) -> list[Arrival]:
        """Return up to `limit` frames of each channel, so that a busy one does not starve the others."""
        return [
            Arrival(bytes((number,)) + arrival.peer, arrival.frame, arrival.tenant)
            for number, channel in enumerate(self._channels)
            for arrival in channel.drain(limit)
        ]

    def send(self, peer: bytes, frame: bytes, more: Sequence[Frame] = ()) -> Delivery:
        return self._channels[peer[0]].send(peer[1:], frame, more)

    def is_local(self, peer: bytes) -> bool:
        return self._channels[peer[0]].is_local(peer[1:])
