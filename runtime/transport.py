"""Transport: one typed channel into a process and its other end, over ZMQ or in memory.

An `Inbox` gives decoded messages; an `Outbox` takes one and says whether there was room. Nothing here blocks
for ever, and nothing that arrives can raise: a frame that is not what the socket's union allows is counted,
logged once a second, dropped.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol

import msgspec
import zmq

from runtime.errors import ProtocolMismatch
from runtime.messages import UNIONS
from runtime.wire import HEADER_BYTES, PREFIX_BYTES, Message, describe_header, header, schema_hash

logger = logging.getLogger(__name__)

SCHEMA = schema_hash(UNIONS.values())
HIGH_WATER_MARK = 1000
MAX_FRAME_BYTES = 64 << 20
# The processes start together and senders may connect before a receiver has bound; the default of 100 ms
# would be felt.
RECONNECT_MS = 10
# msgspec raises more than its own errors on hostile input: invalid UTF-8, deep nesting, lengths that
# overflow.
DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError, OverflowError)


class Codec:
    """Header and msgpack body of one union. Raises ProtocolMismatch
    or one of DECODE_ERRORS on a frame it does not accept.
    """

    def __init__(self, union: Any, epoch: int) -> None:
        self.epoch = epoch
        self.header = header(SCHEMA, epoch)
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(union).decode

    def encode(self, message: Message) -> bytes:
        return self.header + self._encode(message)

    def decode(self, frame: bytes, *, any_epoch: bool = False) -> Any:
        """`any_epoch` accepts what an earlier or later start of the ring sent: only a first Hello may."""
        size = PREFIX_BYTES if any_epoch else HEADER_BYTES
        if frame[:size] != self.header[:size]:
            raise ProtocolMismatch(
                f"got {describe_header(frame[:HEADER_BYTES])}; expected {describe_header(self.header)}"
            )
        return self._decode(memoryview(frame)[HEADER_BYTES:])


class Inbox(Protocol):
    def drain(self, limit: int = HIGH_WATER_MARK) -> list[Any]:
        """Everything that has arrived, at most `limit` messages, in order. Never blocks."""

    def close(self) -> None: ...


class Outbox(Protocol):
    def send(self, message: Message) -> bool:
        """Send without blocking. False: the other end has no room, nothing was sent, try again later."""

    def close(self) -> None: ...


class BadFrames:
    """Counts what could not be decoded and says so at most once a second."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0
        self._next_log_at = 0.0

    def add(self, error: Exception) -> None:
        self.count += 1
        now = time.monotonic()
        if now >= self._next_log_at:
            self._next_log_at = now + 1.0
            logger.warning("%s: dropped a frame (%d so far): %s", self.name, self.count, error)


class ZmqInbox:
    """The PULL end, bound by its owner. `name` is the socket's key in UNIONS."""

    def __init__(self, context: zmq.Context[Any], address: str, name: str, epoch: int) -> None:
        self._codec = Codec(UNIONS[name], epoch)
        self.bad_frames = BadFrames(name)
        self.socket = context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        bind_private(self.socket, address)

    def drain(self, limit: int = HIGH_WATER_MARK) -> list[Any]:
        messages: list[Any] = []
        for _ in range(limit):
            try:
                frame = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            if self.socket.getsockopt(zmq.RCVMORE):
                self._drop_rest()
                continue
            try:
                messages.append(self._codec.decode(frame))
            except (ProtocolMismatch, *DECODE_ERRORS) as error:
                self.bad_frames.add(error)
        return messages

    def _drop_rest(self) -> None:
        while self.socket.getsockopt(zmq.RCVMORE):
            self.socket.recv(zmq.NOBLOCK)
        self.bad_frames.add(ValueError("a message of several frames where one was expected"))

    def close(self) -> None:
        self.socket.close()


class ZmqOutbox:
    """The PUSH end, connected by each sender."""

    def __init__(self, context: zmq.Context[Any], address: str, epoch: int, *, linger_ms: int = 0) -> None:
        self._codec = Codec(Any, epoch)
        self.socket = context.socket(zmq.PUSH)
        self.socket.setsockopt(zmq.LINGER, linger_ms)
        self.socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self.socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self.socket.connect(address)

    def send(self, message: Message) -> bool:
        try:
            self.socket.send(self._codec.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        self.socket.close()


class MemoryChannel:
    """Both ends in one process, through the same codec as the sockets: for tests and for offline use."""

    def __init__(self, name: str, epoch: int = 0, capacity: int = HIGH_WATER_MARK) -> None:
        self._codec = Codec(UNIONS[name], epoch)
        self._frames: deque[bytes] = deque()
        self._capacity = capacity
        self.bad_frames = BadFrames(name)

    def send(self, message: Message) -> bool:
        if len(self._frames) >= self._capacity:
            return False
        self._frames.append(self._codec.encode(message))
        return True

    def drain(self, limit: int = HIGH_WATER_MARK) -> list[Any]:
        messages: list[Any] = []
        while self._frames and len(messages) < limit:
            try:
                messages.append(self._codec.decode(self._frames.popleft()))
            except (ProtocolMismatch, *DECODE_ERRORS) as error:
                self.bad_frames.add(error)
        return messages

    def close(self) -> None:
        self._frames.clear()


class Waiter:
    """Blocks until one of the sockets has something to read."""

    def __init__(self, sockets: Iterable[zmq.Socket[Any]]) -> None:
        self._poller = zmq.Poller()
        for socket in sockets:
            self._poller.register(socket, zmq.POLLIN)

    def wait(self, timeout_s: float) -> bool:
        """True: something can be read. False: the time is over."""
        return bool(self._poller.poll(max(0, int(timeout_s * 1000))))


def bind_private(socket: zmq.Socket[Any], address: str) -> None:
    """Bind so that no other user of the machine can connect, whatever the mode of the directory."""
    old = os.umask(0o077)
    try:
        socket.bind(address)
    finally:
        os.umask(old)
