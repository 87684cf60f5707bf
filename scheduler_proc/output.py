"""Output: gathers what one step has to say into one
TokenBatch, and keeps what the other end has no room for yet.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from msgspec import Raw

from runtime.messages import Closed, ControlReply, TokenBatch, TokenLogprobs
from runtime.transport import Outbox
from runtime.wire import IntArray, Message, pack_ids


class Output:
    """Sends in order, never blocks. While `is_blocked`, callers should produce nothing new."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._refused: list[Message] = []
        self._replies: list[Message] = []
        self._num_sent = 0
        self._clear()

    def _clear(self) -> None:
        self._handles: list[bytes] = []
        self._tokens: list[bytes] = []
        self._opened: list[Raw] = []
        self._logprobs: list[TokenLogprobs] = []
        self._closed: list[Closed] = []

    def open(self, stream_open: Raw) -> None:
        self._opened.append(stream_open)

    def add_each(self, handles: npt.NDArray[np.void], tokens: IntArray) -> None:
        """One token for each handle ([n] V16, [n] int32)."""
        self._handles.append(handles.tobytes())
        self._tokens.append(tokens.tobytes())

    def add(self, handle: bytes, tokens: list[int]) -> None:
        """Several tokens for one sequence, in order."""
        self._handles.append(handle * len(tokens))
        self._tokens.append(pack_ids(tokens))

    def add_logprobs(self, logprobs: TokenLogprobs) -> None:
        self._logprobs.append(logprobs)

    def close(self, closed: Closed) -> None:
        self._closed.append(closed)

    def reply(self, reply: ControlReply) -> None:
        self._replies.append(reply)

    @property
    def is_blocked(self) -> bool:
        """The other end refused something that is still to be sent."""
        return bool(self._refused)

    def flush(self) -> bool:
        """Send what there is. False: the other end has no room; try again later.

        What was refused is kept as it is and goes first; what is said meanwhile is gathered into one later
        batch.
        """
        if not self._try_send_refused():
            return False
        if self._handles or self._opened or self._closed or self._logprobs:
            self._num_sent += 1
            batch = TokenBatch(
                self._num_sent,
                b"".join(self._handles),
                b"".join(self._tokens),
                tuple(self._opened),
                tuple(self._logprobs),
                tuple(self._closed),
            )
            self._clear()
            self._refused.append(batch)
        if self._replies:
            self._refused += self._replies
            self._replies = []
        return self._try_send_refused()

    def _try_send_refused(self) -> bool:
        while self._refused:
            if not self._outbox.send(self._refused[0]):
                return False
            del self._refused[0]
        return True
