"""Sockets of a connection: a Lane to each detokenizer, and a TokenizerOutbox to each tokenizer. Only the I/O
thread uses the lanes.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import Any, TypeAlias

import zmq
from zmq.utils.monitor import recv_monitor_message

from carousel.client.connection.target import Target
from runtime.base.errors import ProtocolMismatch
from runtime.wire.format import PROTOCOL_VERSION
from runtime.wire.handle import MAX_ABORT_HANDLES
from runtime.wire.messages import (
    AbortRequest,
    Hello,
    HelloAck,
    Ping,
    ToClient,
)
from runtime.wire.outbox import KeepingOutbox
from runtime.wire.transport import (
    DECODE_ERRORS,
    HIGH_WATER_MARK,
    MAX_FRAME_BYTES,
    SCHEMA,
    BadFrames,
    MessageCodec,
    receive_all,
)

Socket: TypeAlias = zmq.Socket[Any]
LONG_FRAME_BYTES = 256 << 10
MAX_UNREAD = 64
"""Maximum number of messages that ZMQ keeps for this process until they are read. The detokenizer combines
what it cannot send, so a backlog takes less memory there, and is bounded here.
"""
DRAIN_BYTES = 1 << 20
"""Number of bytes after which no further messages are received in one go."""
EncodedMessage: TypeAlias = bytes | bytearray
"""Message in its form on the wire."""


class Link:
    """State of one socket's connection, for sockets on which nothing else shows it."""

    EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH

    def __init__(self, socket: zmq.Socket[Any], address: str) -> None:
        """Watch the connection that `socket` will make to `address`."""
        self._socket = socket
        self._address = address
        self._events = socket.get_monitor_socket(self.EVENTS)
        self._stands = False
        self._is_lost = False
        self._was_lost = False
        self._is_refused = False

    @property
    def stands(self) -> bool:
        """Return True if the other end has accepted the connection and it has not broken since."""
        self._look()
        return self._stands

    @property
    def is_lost(self) -> bool:
        """Return True if the connection was once established, or was refused, and is not established now."""
        self._look()
        return self._is_lost

    @property
    def was_lost(self) -> bool:
        """Return True if the connection has broken or was refused since the last `forgive`, even if it is
        established again: the other end takes the new connection for another client's.
        """
        self._look()
        return self._was_lost

    def forgive(self) -> bool:
        """Forget earlier losses. Returns True if there were any."""
        was_lost = self.was_lost
        self._was_lost = False
        return was_lost

    def retry(self) -> None:
        """Connect again if the other end did not know our key, because it may know it by now. ZMQ keeps
        trying an end that is not there, but gives up one that has refused it, together with all that was
        sent.
        """
        self._look()
        if self._is_refused:
            self._is_refused = False
            with contextlib.suppress(zmq.ZMQError):  # it may have been forgotten already
                self._socket.disconnect(self._address)
            self._socket.connect(self._address)

    def _look(self) -> None:
        while self._events.poll(0):
            event = recv_monitor_message(self._events)["event"]
            self._stands = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._is_lost = not self._stands
            self._was_lost = self._was_lost or self._is_lost
            self._is_refused = self._is_refused or event == zmq.EVENT_HANDSHAKE_FAILED_AUTH

    def close(self) -> None:
        self._socket.disable_monitor()
        self._events.close(linger=0)


class Lane:
    """DEALER socket to one detokenizer, with the client id that this one has drawn for us. When the
    detokenizer was replaced or the connection lost, a new lane claims the id of the old one.

    Decodes arriving messages. Frames that cannot be decoded are counted and dropped, so a bad frame ends no
    stream.
    """

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
        """Client id, with which every handle of this lane starts; 0: the detokenizer draws one."""
        self.is_open = False
        """True if the detokenizer has answered."""
        address = target.client_out(index)
        self.socket, self._link = connect(context, zmq.DEALER, target, address)
        self._codec = MessageCodec(ToClient, 0)
        self._bad_frames = bad_frames
        self._hello = Hello(PROTOCOL_VERSION, SCHEMA.hex(), target.wants_status, client_id)
        self.greet()

    def greet(self) -> None:
        """Send a Hello. Repeated until there is an answer, because the detokenizer may first have to give up
        an earlier holder of the id.
        """
        if self._link is not None:
            self._link.retry()
        with contextlib.suppress(zmq.Again):
            self.socket.send(self._codec.encode(self._hello), zmq.NOBLOCK)

    def read_ack(self) -> HelloAck | None:
        """Return the answer to our Hello, if it has arrived. Raises ProtocolMismatch."""
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
            self._link.forgive()  # messages that were lost before the answer were sent again
        self.client_id = ack.client
        self.is_open = True
        self._codec = MessageCodec(ToClient, ack.epoch)
        return ack

    def receive(self) -> tuple[list[Any], int]:
        """Return messages that have arrived, and their size in bytes, as an Inbox does. If there are more
        than DRAIN_BYTES, the others come with the next call.
        """
        return receive_all(self.socket, self._codec, self._bad_frames, max_bytes=DRAIN_BYTES)

    @property
    def is_lost(self) -> bool:
        """Return True if the connection was answered but is no longer established, as far as this can be
        seen.
        """
        return self._link is not None and self._link.was_lost

    def ping(self) -> None:
        """Send a ping, or a Hello if there was no answer yet."""
        if not self.is_open:
            self.greet()
            return
        # A server that does not read is noticed by its silence.
        with contextlib.suppress(zmq.Again):
            self.socket.send(self._codec.encode(Ping(self.client_id)), zmq.NOBLOCK)

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
        self.socket.close(linger=0)


class TokenizerOutbox:
    """Queue of callers' messages for one tokenizer. A caller sends its message itself if nothing stands in
    its way, which saves it a change of threads; the I/O thread sends what is left.
    """

    def __init__(self, context: zmq.Context[Any], target: Target, address: str, codec: MessageCodec) -> None:
        self.socket, self.link = connect(context, zmq.PUSH, target, address)
        self.unsent = KeepingOutbox[EncodedMessage](self._send)
        self.aborts: deque[bytes] = deque()
        """Handles of sequences to abort. They are combined into one message, because many callers may leave
        at once.
        """
        self._codec = codec
        # A socket may be used by several threads, one at a time.
        self._in_use = threading.Lock()
        self._is_open = False
        """True while callers may send. Otherwise only the I/O thread uses the socket."""

    @property
    def is_in_use(self) -> bool:
        """Return True while a thread uses the socket."""
        return self._in_use.locked()

    def send_now(self) -> bool:
        """Send waiting messages in a caller's thread. Returns False if the I/O thread has to send them."""
        # A destructor may have interrupted the thread that uses it.
        if self._in_use.locked():
            return False
        # Not by `acquire(blocking=False)`: nobody would release it if an interrupt came before the `try`.
        with self._in_use:
            self._is_open = self._is_open and self.unsent.flush()
            return self._is_open

    def try_send(self) -> bool:
        """Send waiting messages, aborts after the requests that they end, and let callers send from then on.
        Returns False if the other end has no room for the rest. Then no caller uses the socket until the next
        call, so it may be polled. For the I/O thread.
        """
        while self.aborts:
            count = min(len(self.aborts), MAX_ABORT_HANDLES)
            handles = tuple(self.aborts.popleft() for _ in range(count))
            self.unsent.add(self._codec.encode(AbortRequest(handles)))
        with self._in_use:
            self._is_open = self.unsent.flush()
        return self._is_open

    def hold(self) -> None:
        """Keep callers from sending until the next `try_send`."""
        with self._in_use:
            self._is_open = False

    def retry_link(self) -> None:
        """Connect again if the tokenizer did not know our key."""
        if self.link is not None:
            with self._in_use:
                self.link.retry()

    def _send(self, message: EncodedMessage) -> bool:
        try:
            # Copying a long message would hold up the process's other threads.
            self.socket.send(message, zmq.NOBLOCK, copy=len(message) < LONG_FRAME_BYTES)
        except zmq.Again:
            return False
        return True


def connect(context: zmq.Context[Any], kind: int, target: Target, address: str) -> tuple[Socket, Link | None]:
    """Return a socket that connects to `address`, with its link if nothing else shows whether the other end
    is there.
    """
    socket: Socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, MAX_UNREAD)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    target.prepare(socket)
    link = Link(socket, address) if target.wants_status else None
    socket.connect(address)
    return socket, link
