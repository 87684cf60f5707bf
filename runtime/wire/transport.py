"""Transport: a typed channel between processes, over ZMQ or in memory.

An `Inbox` returns decoded messages; an `Outbox` takes one and says whether there was room. Nothing here
blocks for ever, and no frame that arrives can raise: one that the socket's union does not allow is counted,
logged at most once a second, and dropped.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec
import zmq

from runtime.base.errors import ProtocolMismatch
from runtime.wire.format import HEADER_BYTES, PREFIX_BYTES, Message, describe_header, header, schema_hash
from runtime.wire.messages import UNIONS

logger = logging.getLogger(__name__)

SCHEMA = schema_hash(UNIONS.values())
HIGH_WATER_MARK = 1000
MAX_FRAME_BYTES = 64 << 20
MAX_TCP_FRAME_BYTES = 8 << 20
MAX_DRAIN_BYTES = 16 << 20
"""Maximum number of bytes received before the messages so far are handled. A decoded frame may take several
times its bytes.
"""
USER_ID = "User-Id"
"""Property that ZMQ attaches to a frame: the sender's public key in Z85, as set by zmq.auth."""
# The processes start together, so a sender may connect before the receiver has bound; the default interval of
# 100 ms would be noticeable.
RECONNECT_MS = 10
# Messages between scheduler and worker are valid only between the two that were started together. Elsewhere
# the handle's attempt says what is stale, and messages of a process that has been replaced may still be
# valid.
ENGINE_SOCKETS = frozenset(("rank_in", "step_results"))
# After each of so many messages a drain asks whether there is another. Mostly there is none, and the error of
# a receive that says so takes much longer. Behind more messages it is rare.
NUM_ASKED = 2
# Plain ints, because `&` and `|` of pyzmq's enums take longer than many a call of ZMQ.
EVENTS, READABLE = int(zmq.EVENTS), int(zmq.POLLIN)
NOBLOCK, MORE_FOLLOW = int(zmq.NOBLOCK), int(zmq.NOBLOCK) | int(zmq.SNDMORE)
# On hostile input msgspec raises more than its own errors: for invalid UTF-8, deep nesting, and lengths that
# overflow.
DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError, OverflowError)


Frame: TypeAlias = bytes | memoryview
"""Raw data behind a message, copied as little as possible."""
StampMessage: TypeAlias = Callable[[Any, str], Any]
NoteRead: TypeAlias = Callable[[zmq.Frame], object]
"""Function of a message and the proven public key of its sender, in Z85. Returns the message to deliver, or
raises ValueError to drop it.
"""


class Framed(NamedTuple):
    """Message together with the raw frames behind it, as an Inbox returns it."""

    message: Message
    frames: tuple[Frame, ...]


class MessageCodec:
    """Header and msgpack body of one union. Raises ProtocolMismatch or one of DECODE_ERRORS for a frame that
    it does not accept.
    """

    def __init__(self, union: Any, epoch: int) -> None:
        self.epoch = epoch
        self.header = header(SCHEMA, epoch)
        encoder = msgspec.msgpack.Encoder()
        self._encode, self._encode_into = encoder.encode, encoder.encode_into
        self._decode = msgspec.msgpack.Decoder(union).decode

    def encode(self, message: Message) -> bytes:
        return self.header + self._encode(message)

    def encode_in_place(self, message: Message) -> bytearray:
        """Encode a message that may be large, without copying it behind the header."""
        frame = bytearray(self.header)
        self._encode_into(message, frame, len(frame))
        return frame

    def decode(self, frame: Frame | bytearray, *, any_epoch: bool = False) -> Any:
        """Return the message in a frame. any_epoch: also accept messages of processes of other epochs. Raises
        ProtocolMismatch or one of DECODE_ERRORS.
        """
        size = PREFIX_BYTES if any_epoch else HEADER_BYTES
        if frame[:size] != self.header[:size]:
            raise ProtocolMismatch(
                f"got {describe_header(bytes(frame[:HEADER_BYTES]))}; expected {describe_header(self.header)}"
            )
        return self._decode(memoryview(frame)[HEADER_BYTES:])


class Inbox(Protocol):
    def drain(self, limit: int = HIGH_WATER_MARK, max_bytes: int | None = None) -> list[Any]:
        """Return the messages that have arrived, in order, at most `limit`, and none after max_bytes,
        which are MAX_DRAIN_BYTES unless given. Never blocks. A message with raw frames behind it is returned
        as Framed, with `num_frames` of them.
        """

    def close(self) -> None: ...


class Outbox(Protocol):
    def send(self, message: Message, frames: Sequence[Frame] = ()) -> bool:
        """Send without blocking, with `message.num_frames` raw frames behind it. Returns False, with nothing
        sent, if the other end has no room; try again later.
        """

    def close(self) -> None: ...


class BadFrames:
    """Counts frames that could not be decoded, and logs them at most once a second."""

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


def bind_private(socket: zmq.Socket[Any], address: str) -> None:
    """Bind so that no other user of the machine can connect, whatever the mode of the directory."""
    old = os.umask(0o077)
    try:
        socket.bind(address)
    finally:
        os.umask(old)


class ZmqInbox:
    """PULL end of a channel, bound by its owner. name: key of the socket in UNIONS. Sockets of ENGINE_SOCKETS
    accept messages of their own epoch only.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        name: str,
        epoch: int,
        *,
        bind: Callable[[zmq.Socket[Any], str], None] = bind_private,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        max_unread: int = HIGH_WATER_MARK,
        stamp: StampMessage | None = None,
        note_read: NoteRead | None = None,
    ) -> None:
        """bind: replaces `bind_private` where other users may connect. max_frame_bytes: a peer that sends a
        larger frame is disconnected. max_unread: most messages of one peer that ZMQ holds. stamp: checks each
        message where peers have keys. note_read: called with the first frame of each message there.
        """
        self._codec = MessageCodec(UNIONS[name], epoch)
        self._stamp = stamp
        self._note_read = note_read
        self._any_epoch = name not in ENGINE_SOCKETS
        self.bad_frames = BadFrames(name)
        self.socket = context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, max_unread)
        self.socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
        bind(self.socket, address)

    def drain(self, limit: int = HIGH_WATER_MARK, max_bytes: int | None = None) -> list[Any]:
        messages, _ = receive_all(
            self.socket,
            self._codec,
            self.bad_frames,
            limit,
            max_bytes=max_bytes,
            any_epoch=self._any_epoch,
            stamp=self._stamp,
            note_read=self._note_read,
        )
        return messages

    def close(self) -> None:
        self.socket.close()


def receive_all(
    socket: zmq.Socket[Any],
    codec: MessageCodec,
    bad_frames: BadFrames,
    limit: int = HIGH_WATER_MARK,
    *,
    max_bytes: int | None = None,
    any_epoch: bool = False,
    stamp: StampMessage | None = None,
    note_read: NoteRead | None = None,
) -> tuple[list[Any], int]:
    """Return the messages that have arrived at a socket, as Inbox.drain does, and how many bytes they had.
    `max_bytes` takes the place of MAX_DRAIN_BYTES. stamp, note_read: as in ZmqInbox.
    """
    most = MAX_DRAIN_BYTES if max_bytes is None else max_bytes
    messages: list[Any] = []
    num_bytes = 0
    for _ in range(limit):
        if num_bytes >= most or (0 < len(messages) <= NUM_ASKED and not can_read(socket)):
            break
        try:
            # Only a frame that is not copied knows its peer; for small ones a copy is faster.
            received: Any = socket.recv(NOBLOCK, copy=stamp is None)
        except zmq.Again:
            break
        frame: Frame = received if stamp is None else received.buffer
        num_bytes += len(frame)
        if note_read is not None:
            note_read(received)
        try:
            message = codec.decode(frame, any_epoch=any_epoch)
            if stamp is not None:
                message = stamp(message, key_of(received))
            more = _receive_more(socket, message.num_frames) if socket.getsockopt(zmq.RCVMORE) else ()
            num_bytes += sum(map(len, more))
            messages.append(with_frames(message, more))
        except (ProtocolMismatch, *DECODE_ERRORS) as error:
            skip_more(socket)
            bad_frames.add(error)
    return messages, num_bytes


def can_read(socket: zmq.Socket[Any]) -> bool:
    """Return True if a message can be received at once."""
    return bool(int(socket.getsockopt(EVENTS)) & READABLE)


def key_of(frame: zmq.Frame) -> str:
    """Return the proven public key (Z85) of the sender of a frame. Raises ValueError if it has none."""
    try:
        return str(frame.get(USER_ID))
    except zmq.ZMQError:
        raise ValueError("the sender has no key") from None


def _receive_more(socket: zmq.Socket[Any], limit: int) -> tuple[Frame, ...]:
    """Return the frames behind a message, at most `limit`. Raises ValueError if there are more."""
    frames: list[Frame] = []
    while socket.getsockopt(zmq.RCVMORE) and len(frames) < limit:
        frames.append(socket.recv(zmq.NOBLOCK, copy=False).buffer)
    num_more = skip_more(socket)
    if num_more:
        raise ValueError(f"{limit + num_more} raw frames behind a message with {limit}")
    return tuple(frames)


def skip_more(socket: zmq.Socket[Any]) -> int:
    """Drop the remaining frames of the message that is being received, one by one, because ZMQ does not limit
    their number. Returns their number.
    """
    num_frames = 0
    while socket.getsockopt(zmq.RCVMORE):
        socket.recv(zmq.NOBLOCK, copy=False)
        num_frames += 1
    return num_frames


class JoinedInbox:
    """Several inboxes read as one. In each turn another one comes first, so that a busy one does not starve
    the others.
    """

    def __init__(self, inboxes: Iterable[Inbox]) -> None:
        self._inboxes = deque(inboxes)

    def drain(self, limit: int = HIGH_WATER_MARK, max_bytes: int | None = None) -> list[Any]:
        """Return the messages of the next inbox that has any, as its own `drain` does."""
        self._inboxes.rotate()
        for inbox in self._inboxes:
            messages = inbox.drain(limit, max_bytes)
            if messages:
                return messages
        return []

    def close(self) -> None:
        for inbox in self._inboxes:
            inbox.close()


class ZmqOutbox:
    """PUSH end of a channel, connected by each sender."""

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        epoch: int,
        *,
        linger_ms: int = 0,
        prepare: Callable[[zmq.Socket[Any]], None] = lambda socket: None,
    ) -> None:
        """prepare: configures a socket before it connects to another machine."""
        self._codec = MessageCodec(Any, epoch)
        self.socket = context.socket(zmq.PUSH)
        prepare(self.socket)
        self.socket.setsockopt(zmq.LINGER, linger_ms)
        self.socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self.socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self.socket.connect(address)

    def send(self, message: Message, frames: Sequence[Frame] = ()) -> bool:
        head = self._codec.encode(message)
        try:
            if frames:
                self.socket.send_multipart([head, *frames], zmq.NOBLOCK, copy=False)
            else:
                self.socket.send(head, NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        self.socket.close()


class MemoryChannel:
    """Both ends in one process, through the same codec as the sockets; for tests."""

    def __init__(self, name: str, epoch: int = 0, capacity: int = HIGH_WATER_MARK) -> None:
        self._codec = MessageCodec(UNIONS[name], epoch)
        self._any_epoch = name not in ENGINE_SOCKETS
        self._messages: deque[tuple[bytes, tuple[Frame, ...]]] = deque()
        self._capacity = capacity
        self.bad_frames = BadFrames(name)

    def send(self, message: Message, frames: Sequence[Frame] = ()) -> bool:
        if len(self._messages) >= self._capacity:
            return False
        self._messages.append((self._codec.encode(message), tuple(frames)))
        return True

    def drain(self, limit: int = HIGH_WATER_MARK, max_bytes: int | None = None) -> list[Any]:
        messages: list[Any] = []
        most = MAX_DRAIN_BYTES if max_bytes is None else max_bytes
        num_bytes = 0
        while self._messages and len(messages) < limit and num_bytes < most:
            head, frames = self._messages.popleft()
            num_bytes += len(head) + sum(map(len, frames))
            try:
                messages.append(with_frames(self._codec.decode(head, any_epoch=self._any_epoch), frames))
            except (ProtocolMismatch, *DECODE_ERRORS) as error:
                self.bad_frames.add(error)
        return messages

    def close(self) -> None:
        self._messages.clear()


class Waiter:
    """Waits until one of several sockets can be read."""

    def __init__(self, sockets: Iterable[zmq.Socket[Any] | int]) -> None:
        """sockets: ZMQ sockets or file descriptors."""
        self._poller = zmq.Poller()
        for socket in sockets:
            self._poller.register(socket, zmq.POLLIN)
        self._found: list[tuple[zmq.Socket[Any] | int, int]] = list(self._poller.sockets)

    def wait(self, timeout_s: float) -> bool:
        """Wait until something can be read. Returns False after timeout_s, which is rounded up to whole
        milliseconds: a caller that waits for the rest of a time would poll without a pause.
        """
        self._found = self._poller.poll(max(0, math.ceil(timeout_s * 1000)))
        return bool(self._found)

    def has_found(self, sockets: AbstractSet[zmq.Socket[Any]]) -> bool:
        """Return True if one of these sockets could be read when the last wait ended. Before the first wait
        it is True, because nothing is known then.
        """
        return not sockets.isdisjoint(dict(self._found))


def with_frames(message: Message, frames: Sequence[Frame]) -> Message | Framed:
    """Combine a message with the frames behind it. Raises ValueError if their number is not the one that the
    message states.
    """
    if len(frames) != message.num_frames:
        raise ValueError(f"{len(frames)} raw frames behind a message with {message.num_frames}")
    return Framed(message, tuple(frames)) if frames else message
