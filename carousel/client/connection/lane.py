"""Lane: one DEALER socket, to one detokenizer, and the client id that this one has drawn for us. Where the
detokenizer was replaced or the connection lost, a new lane claims the id that the old one had.

Used by the I/O thread alone. Decodes what arrives; what does not decode is counted and dropped: a bad frame
ends no stream.
"""

from __future__ import annotations

import contextlib
from typing import Any, TypeAlias

import zmq

from carousel.client.connection.link import Link
from carousel.client.connection.target import Target
from runtime.base.errors import ProtocolMismatch
from runtime.wire.format import PROTOCOL_VERSION
from runtime.wire.messages import Hello, HelloAck, Ping, ToClient
from runtime.wire.transport import (
    DECODE_ERRORS,
    HIGH_WATER_MARK,
    MAX_FRAME_BYTES,
    SCHEMA,
    BadFrames,
    Codec,
    receive_all,
)

Socket: TypeAlias = zmq.Socket[Any]


class Lane:
    def __init__(
        self,
        context: zmq.Context[Any],
        target: Target,
        index: int,
        bad_frames: BadFrames,
        client_id: int = 0,
    ) -> None:
        self.index = index
        self.client_id = client_id
        """Every handle of this lane starts with it; 0: the detokenizer draws one."""
        self.is_open = False
        """The detokenizer has answered."""
        self.socket = connect(context, zmq.DEALER, target, target.client_out(index))
        self._link = Link(self.socket) if target.wants_status else None
        self._codec = Codec(ToClient, 0)
        self._bad_frames = bad_frames
        self._hello = Hello(PROTOCOL_VERSION, SCHEMA.hex(), target.wants_status, client_id)
        self.greet()

    def greet(self) -> None:
        """Say who we are; again while there is no answer: who had our id may have to be given up first."""
        with contextlib.suppress(zmq.Again):
            self.socket.send(self._codec.encode(self._hello), zmq.NOBLOCK)

    def read_ack(self) -> HelloAck | None:
        """The answer to our Hello, if that is what has come. Raises ProtocolMismatch."""
        frames = self.socket.recv_multipart()
        try:
            ack = self._codec.decode(frames[0], any_epoch=True)
        except ProtocolMismatch as error:
            raise ProtocolMismatch(
                f"this client library and the runtime are of different builds: {error}"
            ) from None
        except DECODE_ERRORS as error:
            self._bad_frames.add(error)
            return None
        if not isinstance(ack, HelloAck) or (self.client_id and ack.client != self.client_id):
            return None
        if self._link is not None:
            self._link.forgive()  # what was lost before the answer came was made again
        self.client_id = ack.client
        self.is_open = True
        self._codec = Codec(ToClient, ack.epoch)
        return ack

    def receive(self) -> list[Any]:
        """All that has arrived, as an Inbox gives it."""
        return receive_all(self.socket, self._codec, self._bad_frames)

    @property
    def is_lost(self) -> bool:
        """The connection that was answered does not stand any more, as far as that can be seen."""
        return self._link is not None and self._link.was_lost

    def ping(self) -> None:
        """Show that we are there, or greet."""
        if not self.is_open:
            self.greet()
            return
        # A server that does not read will be known by its silence.
        with contextlib.suppress(zmq.Again):
            self.socket.send(self._codec.encode(Ping(self.client_id)), zmq.NOBLOCK)

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
        self.socket.close(linger=0)


def connect(context: zmq.Context[Any], kind: int, target: Target, address: str) -> Socket:
    socket: Socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    target.prepare(socket)
    socket.connect(address)
    return socket
