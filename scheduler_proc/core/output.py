"""Output: gathers what one step sends to each detokenizer into one TokenBatch, and keeps messages that a
detokenizer has no room for yet.

    TensorBatch(es) of raw logits → TokenBatch → ControlReplies        in this order, for each detokenizer
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Raw, msgpack

from runtime.wire.format import IntArray, Message
from runtime.wire.handle import client_of
from runtime.wire.hypotheses import HypothesisSoFar
from runtime.wire.messages import (
    Closed,
    ControlReply,
    ControlRequest,
    TensorBatch,
    TensorEntry,
    TokenBatch,
    TokenLogprobs,
)
from runtime.wire.outbox import KeepingOutbox
from runtime.wire.transport import Frame, Outbox

MAX_BACKLOG = 8192
"""Maximum number of opened sequences and replies that wait for a detokenizer which does not read. At this
point the scheduler stops reading its inbox; before it, aborts are still applied. Together with the batch
before them they take 80 MB if each is an error with a long text.
"""
MAX_BACKLOG_BYTES = 64 << 20
"""Maximum number of bytes of waiting sequence openings. A resumed sequence brings its output so far."""
MAX_TENSORS = 1024
"""Maximum number of raw frames in one message."""
HANDLE = np.dtype([("client", "<u8"), ("rest", "V8")])


def reply_to(request: ControlRequest, body: object, ok: bool = True) -> ControlReply:
    """Make the reply to a control call. body: any value that msgpack can encode; an ErrorInfo if `ok` is
    False.
    """
    return ControlReply(request.client, request.number, Raw(msgpack.encode(body)), ok)


class Output(Protocol):
    """The scheduler's outgoing messages to the detokenizers. Sends in order and never blocks."""

    def open(self, handle: bytes, stream_open: Raw) -> None: ...

    def add_each(self, handles: npt.NDArray[np.void], tokens: IntArray) -> None:
        """Add one token to each of n sequences. handles: [n] V16; tokens: [n] int32."""

    def add(self, handle: bytes, tokens: list[int]) -> None:
        """Add several tokens to one sequence, in order."""

    def add_logprobs(self, logprobs: TokenLogprobs) -> None:
        """Add log-probabilities of tokens that are added in the same step."""

    def add_prompt_logprobs(self, logprobs: TokenLogprobs) -> None: ...

    def show(self, hypothesis: HypothesisSoFar) -> None:
        """Send the current hypothesis of a sequence of a beam search."""

    def add_tensor(self, entry: TensorEntry, frame: Frame) -> None:
        """Add a frame of raw logits of a sequence that was opened in an earlier step."""

    def close(self, closed: Closed) -> None: ...

    def reply(self, reply: ControlReply) -> None: ...

    @property
    def is_blocked(self) -> bool:
        """True if a message was refused and is still to be sent. Callers should then produce nothing new."""

    @property
    def is_full(self) -> bool:
        """True if no further sequence should be accepted until the detokenizer reads."""

    def flush(self, *, holds_openings: bool = False) -> bool:
        """Send everything that is gathered. Returns False if the other end has no room; try again later.

        A refused message is kept unchanged and goes first. Later output is gathered into one further batch.
        holds_openings: if nothing but openings is gathered, leave it for the next flush.
        """


class DetokenizerOutput:
    """Output to one detokenizer."""

    def __init__(self, outbox: Outbox, epoch: int = 0) -> None:
        self._outbox = outbox
        self._epoch = epoch
        self._refused = KeepingOutbox[tuple[Message, Sequence[Frame]]](lambda each: self._outbox.send(*each))
        self._replies: list[ControlReply] = []
        self._num_sent = 0
        self._clear()

    def _clear(self) -> None:
        self._handles: list[bytes] = []
        self._tokens: list[bytes] = []
        self._opened: list[Raw] = []
        self._opened_bytes = 0
        self._logprobs: list[TokenLogprobs] = []
        self._closed: list[Closed] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._shown: list[HypothesisSoFar] = []
        self._entries: list[TensorEntry] = []
        self._frames: list[Frame] = []

    def open(self, handle: bytes, stream_open: Raw) -> None:
        self._opened.append(stream_open)
        self._opened_bytes += len(stream_open)

    def add_each(self, handles: npt.NDArray[np.void], tokens: IntArray) -> None:
        self._handles.append(handles.tobytes())
        self._tokens.append(tokens.tobytes())

    def add(self, handle: bytes, tokens: list[int]) -> None:
        self._handles.append(handle * len(tokens))
        self._tokens.append(array("i", tokens).tobytes())  # pack_ids takes four times as long for one or two

    def add_logprobs(self, logprobs: TokenLogprobs) -> None:
        self._logprobs.append(logprobs)

    def add_prompt_logprobs(self, logprobs: TokenLogprobs) -> None:
        self._prompt_logprobs.append(logprobs)

    def show(self, hypothesis: HypothesisSoFar) -> None:
        self._shown.append(hypothesis)

    def add_tensor(self, entry: TensorEntry, frame: Frame) -> None:
        self._entries.append(entry)
        self._frames.append(frame)

    def close(self, closed: Closed) -> None:
        self._closed.append(closed)

    def reply(self, reply: ControlReply) -> None:
        self._replies.append(reply)

    @property
    def is_blocked(self) -> bool:
        return bool(self._refused)

    @property
    def is_full(self) -> bool:
        # Only output of arrivals is counted: the rest is bounded by the live requests and the steps in
        # flight.
        num_left = len(self._opened) + len(self._replies)
        return num_left >= MAX_BACKLOG or self._opened_bytes >= MAX_BACKLOG_BYTES

    def flush(self, *, holds_openings: bool = False) -> bool:
        if not self._refused.flush():
            return False
        if self._entries:
            self._gather_tensors()
        has_more = self._handles or self._closed or self._logprobs or self._prompt_logprobs or self._shown
        if has_more or (self._opened and not holds_openings):
            self._num_sent += 1
            batch = TokenBatch(
                self._num_sent,
                b"".join(self._handles),
                b"".join(self._tokens),
                tuple(self._opened),
                tuple(self._logprobs),
                tuple(self._closed),
                tuple(self._prompt_logprobs),
                tuple(self._shown),
                self._epoch,
            )
            self._clear()
            self._refused.add((batch, ()))
        if self._replies:
            for reply in self._replies:
                self._refused.add((reply, ()))
            self._replies = []
        return self._refused.flush()

    def _gather_tensors(self) -> None:
        """Send tensors before the batch that may close their sequence. An earlier batch has opened it,
        because no step is committed before the openings of its sequences are sent.
        """
        for at in range(0, len(self._entries), MAX_TENSORS):
            entries = tuple(self._entries[at : at + MAX_TENSORS])
            self._refused.add((TensorBatch(entries), self._frames[at : at + MAX_TENSORS]))
        self._entries = []
        self._frames = []


class OutputRouter:
    """Output to several detokenizers. A sequence belongs to number `client id` mod their count."""

    def __init__(self, outboxes: Sequence[Outbox], epoch: int = 0) -> None:
        self._outputs = [DetokenizerOutput(outbox, epoch) for outbox in outboxes]

    def _output_of(self, handle: bytes) -> DetokenizerOutput:
        return self._outputs[client_of(handle) % len(self._outputs)]

    def open(self, handle: bytes, stream_open: Raw) -> None:
        self._output_of(handle).open(handle, stream_open)

    def add_each(self, handles: npt.NDArray[np.void], tokens: IntArray) -> None:
        numbers = handles.view(HANDLE)["client"] % len(self._outputs)
        for number, output in enumerate(self._outputs):
            mine = numbers == number
            if mine.any():
                output.add_each(handles[mine], tokens[mine])

    def add(self, handle: bytes, tokens: list[int]) -> None:
        self._output_of(handle).add(handle, tokens)

    def add_logprobs(self, logprobs: TokenLogprobs) -> None:
        self._output_of(logprobs.handle).add_logprobs(logprobs)

    def add_prompt_logprobs(self, logprobs: TokenLogprobs) -> None:
        self._output_of(logprobs.handle).add_prompt_logprobs(logprobs)

    def show(self, hypothesis: HypothesisSoFar) -> None:
        self._output_of(hypothesis.handle).show(hypothesis)

    def add_tensor(self, entry: TensorEntry, frame: Frame) -> None:
        self._output_of(entry.handle).add_tensor(entry, frame)

    def close(self, closed: Closed) -> None:
        self._output_of(closed.handle).close(closed)

    def reply(self, reply: ControlReply) -> None:
        self._outputs[reply.client % len(self._outputs)].reply(reply)

    @property
    def is_blocked(self) -> bool:
        return any(output.is_blocked for output in self._outputs)

    @property
    def is_full(self) -> bool:
        return any(output.is_full for output in self._outputs)

    def flush(self, *, holds_openings: bool = False) -> bool:
        """Send to each detokenizer that has room. Returns False if one has none."""
        has_room = True
        for output in self._outputs:
            has_room = output.flush(holds_openings=holds_openings) and has_room
        return has_room


def make_output(outboxes: Sequence[Outbox], epoch: int = 0) -> Output:
    """Make the output to these detokenizers. outboxes: one each, in their order. epoch: that of
    the engine.
    """
    return DetokenizerOutput(outboxes[0], epoch) if len(outboxes) == 1 else OutputRouter(outboxes, epoch)
