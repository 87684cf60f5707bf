"""OpenRequest: a request that has not ended, and what is needed to make it again when a process of the ring
has been replaced: the request itself, and of each sequence the ids that have come and a few counts.
"""

from __future__ import annotations

import time
from typing import Protocol, TypeAlias

import msgspec
import numpy as np

from carousel.client.core.request_state import RequestState, TensorPart
from runtime.base.errors import CarouselError
from runtime.wire.format import TOKEN_BYTES, unpack_floats
from runtime.wire.handle import MAX_ATTEMPT, attempt_of, split_handle, with_attempt
from runtime.wire.messages import (
    ControlReply,
    ErrorInfo,
    Finish,
    GenerateRequest,
    Resume,
    SequenceOutput,
    Usage,
)

Item: TypeAlias = SequenceOutput | TensorPart | ControlReply | CarouselError


class Mailbox(Protocol):
    def put(self, item: Item) -> None:
        """Keep an item and wake the one who waits. Called in the thread that `deliver` runs in."""


class OpenSequence:
    """A sequence without a terminal. Only the thread that delivers changes it."""

    __slots__ = (
        "_cumulative_logprob",
        "_num_prompt_logprobs",
        "_resumed_at",
        "handle",
        "has_logprobs",
        "ids",
        "num_chars",
        "put",
        "request",
    )

    def __init__(self, request: OpenRequest, handle: bytes) -> None:
        self.request = request
        self.put = request.mailbox.put
        """Gives its caller an item: kept here because it is called for every token."""
        sampling = request.message.sampling
        self.has_logprobs = sampling.logprobs is not None or sampling.prompt_logprobs is not None
        self.handle = handle
        """Of the newest attempt."""
        self.ids = bytearray()
        """What has come of its output, packed."""
        self.num_chars = 0
        """Of the text that has come."""
        self._num_prompt_logprobs = 0
        self._cumulative_logprob = 0.0
        self._resumed_at = (0, 0)
        """Bytes of output and prompt logprobs that had come when its newest attempt was made."""

    def keep_logprobs(self, output: SequenceOutput) -> None:
        """Take note of an output's logprobs."""
        self._num_prompt_logprobs += len(output.prompt_logprobs) // TOKEN_BYTES
        if output.logprobs:
            # One after the other, in float64, as the detokenizer adds them: the sum is the same to the bit.
            values = unpack_floats(output.logprobs).astype(np.float64)
            for value in values.tolist():
                self._cumulative_logprob += value

    @property
    def is_with_scheduler(self) -> bool:
        """Something of its newest attempt has come. What has come of an earlier one says nothing: the newest
        may have been lost on the way.
        """
        return (len(self.ids), self._num_prompt_logprobs) != self._resumed_at

    def next_attempt(self) -> GenerateRequest | None:
        """The request that goes on where this sequence is, alone; its handle is the new one. None when it was
        made as often as can be.
        """
        attempt = attempt_of(self.handle) + 1
        if attempt > MAX_ATTEMPT:
            return None
        self.handle = with_attempt(self.handle, attempt)
        self._resumed_at = (len(self.ids), self._num_prompt_logprobs)
        request = self.request.message
        return msgspec.structs.replace(
            request,
            handle=self.handle,
            sampling=request.sampling.of_sequence(split_handle(self.handle)[2]),
            time_limit_ms=self.request.remaining_ms(),
            resume=self._resume() if any(self._resumed_at) else None,
        )

    def _resume(self) -> Resume:
        return Resume(bytes(self.ids), self.num_chars, self._cumulative_logprob, self._num_prompt_logprobs)


class OpenRequest:
    """One request and its sequences that have no terminal."""

    __slots__ = (
        "_deadline",
        "generation",
        "is_aborted",
        "mailbox",
        "message",
        "number",
        "sequences",
        "state",
    )

    def __init__(self, number: int, mailbox: Mailbox, state: RequestState, generation: int) -> None:
        self.number = number
        self.mailbox = mailbox
        self.state = state
        self.message = state.request
        self.generation = generation
        """How many restarts the connection had seen when it was made, or made again."""
        self.is_aborted = False
        """Its caller has asked for an early end."""
        limit_ms = self.message.time_limit_ms
        self._deadline = time.monotonic() + limit_ms / 1000 if limit_ms else 0.0
        self.sequences = {handle: OpenSequence(self, handle) for handle in state.by_handle}
        """By the handle of the newest attempt."""

    def remaining_ms(self) -> int:
        """Of its time limit, at least 1; 0: it has none."""
        if not self._deadline:
            return 0
        return max(1, round((self._deadline - time.monotonic()) * 1000))

    def rename(self, old: bytes, new: bytes) -> None:
        """A sequence goes on under another handle. What has come under the old one may still be unread."""
        self.sequences[new] = self.sequences.pop(old)
        self.state.by_handle[new] = self.state.by_handle[old]


def exhausted_error() -> ErrorInfo:
    return ErrorInfo(f"the request was made {MAX_ATTEMPT + 1} times and the runtime died each time")


def failure(handle: bytes, error: ErrorInfo) -> SequenceOutput:
    """The terminal of a sequence that is not made again."""
    return SequenceOutput(handle, finish=Finish("error", Usage(0, 0), error=error))
