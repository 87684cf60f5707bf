"""TokenizerWay: what callers have for one tokenizer. Their threads add to it, the I/O thread sends it."""

from __future__ import annotations

from collections import deque
from typing import TypeAlias

import zmq

from carousel.client.connection.lane import Socket
from runtime.wire.handle import MAX_ABORT_HANDLES
from runtime.wire.messages import AbortRequest
from runtime.wire.outbox import KeepingOutbox
from runtime.wire.transport import Codec

LONG_FRAME_BYTES = 256 << 10
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
