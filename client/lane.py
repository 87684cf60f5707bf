"""Lane: one DEALER socket, to one detokenizer, and the client id that this one has drawn for us.

Used by the I/O thread alone. Decodes what arrives; what does not decode is counted and dropped: a bad frame
ends no stream.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, TypeAlias

import zmq

from client.target import Target
from runtime.errors import ProtocolMismatch
from runtime.messages import Hello, HelloAck, Ping, ToClient
from runtime.transport import (
    DECODE_ERRORS,
    HIGH_WATER_MARK,
    MAX_FRAME_BYTES,
    SCHEMA,
    BadFrames,
    Codec,
    Frame,
    with_frames,
)
from runtime.wire import PROTOCOL_VERSION

Socket: TypeAlias = zmq.Socket[Any]


class Lane:
    def __init__(self, context: zmq.Context[Any], target: Target, index: int, bad_frames: BadFrames) -> None:
        self.client_id = 0
        """Every handle of this lane starts with it; 0 before `read_ack`."""
        self.heard_at = time.monotonic()
        self.socket = connect(context, zmq.DEALER, target, target.client_out(index))
        self._monitor: Socket | None = None
        if target.wants_status:
            self._monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._codec = Codec(ToClient, 0)
        self._bad_frames = bad_frames
        hello = Hello(PROTOCOL_VERSION, SCHEMA.hex(), target.wants_status)
        self.socket.send(self._codec.encode(hello))

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
        if not isinstance(ack, HelloAck):
            return None
        self.take_lost()  # what was lost before the answer came was made again
        self.client_id = ack.client
        self._codec = Codec(ToClient, ack.epoch)
        self.heard_at = time.monotonic()
        return ack

    def receive(self) -> list[Any]:
        """All that has arrived, as an Inbox gives it; and note that it is a sign of life."""
        messages: list[Any] = []
        for _ in range(HIGH_WATER_MARK):
            try:
                frame = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            more = self._receive_more() if self.socket.getsockopt(zmq.RCVMORE) else ()
            try:
                messages.append(with_frames(self._codec.decode(frame), more))
            except (ProtocolMismatch, *DECODE_ERRORS) as error:
                self._bad_frames.add(error)
        if messages:
            self.heard_at = time.monotonic()
        return messages

    def _receive_more(self) -> tuple[Frame, ...]:
        frames: list[Frame] = []
        while self.socket.getsockopt(zmq.RCVMORE):
            frames.append(self.socket.recv(zmq.NOBLOCK, copy=False).buffer)
        return tuple(frames)

    def take_lost(self) -> bool:
        """Whether the connection has been lost since the last call, as far as that can be seen. A lane cannot
        be taken up again: to the detokenizer, who comes anew is another client.
        """
        lost = False
        while self._monitor is not None and self._monitor.poll(0):
            self._monitor.recv_multipart()
            lost = True
        return lost

    def ping(self) -> None:
        # A server that does not read will be known by its silence.
        with contextlib.suppress(zmq.Again):
            self.socket.send(self._codec.encode(Ping(self.client_id)), zmq.NOBLOCK)


def connect(context: zmq.Context[Any], kind: int, target: Target, address: str) -> Socket:
    socket: Socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    target.prepare(socket)
    socket.connect(address)
    return socket
