"""TokenizerWay: what callers have for one tokenizer. Their threads add to it, the I/O thread sends it."""

from __future__ import annotations

from collections import deque
from typing import Any, TypeAlias

import zmq
from msgspec.structs import replace

from carousel.client.connection.lane import Socket
from runtime.wire.format import MAX_TEXT_CHARS
from runtime.wire.handle import MAX_ABORT_HANDLES
from runtime.wire.messages import AbortRequest, GenerateRequest, ToTokenizer
from runtime.wire.outbox import KeepingOutbox
from runtime.wire.transport import Codec

LONG_FRAME_BYTES = 256 << 10
LONG_CHARS = 1 << 16
EncodedMessage: TypeAlias = bytes | bytearray
"""A message as it goes on the wire."""


class TokenizerWay:
    def __init__(self, socket: Socket, codec: Codec) -> None:
        self.socket = socket
        self.unsent = KeepingOutbox[EncodedMessage](self._send)
        self.aborts: deque[bytes] = deque()
        """Handles of sequences to abort. Many callers may leave at once: one message for all of them."""
        self._codec = codec

    def try_send(self) -> bool:
        """Send what is waiting, aborts behind the requests that they end. False: the other end has no room
        for the rest.
        """
        while self.aborts:
            count = min(len(self.aborts), MAX_ABORT_HANDLES)
            handles = tuple(self.aborts.popleft() for _ in range(count))
            self.unsent.add(self._codec.encode(AbortRequest(handles)))
        return self.unsent.flush()

    def _send(self, message: EncodedMessage) -> bool:
        try:
            # Whoever else runs in this process waits for a copy of a long one.
            self.socket.send(message, zmq.NOBLOCK, copy=len(message) < LONG_FRAME_BYTES)
        except zmq.Again:
            return False
        return True


def without_long_texts(message: ToTokenizer) -> ToTokenizer:
    """Return the message with empty texts in the place of long ones that are within their bounds: checking
    a message as its receiver does takes long for those, and they cannot be wrong.
    """
    if not isinstance(message, GenerateRequest):
        return message
    messages = message.messages and tuple(
        replace(each, content="") if _is_long(each.content) else each for each in message.messages
    )
    return replace(message, text="" if _is_long(message.text) else message.text, messages=messages)


def _is_long(text: Any) -> bool:
    return isinstance(text, str) and LONG_CHARS < len(text) <= MAX_TEXT_CHARS
