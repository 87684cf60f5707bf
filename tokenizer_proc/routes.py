"""Routes: outgoing messages of a tokenizer. Nothing is dropped: messages that the next process has no room
for are kept.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Sequence

import msgspec

from runtime.base.errors import RequestError
from runtime.wire.error_info import error_info
from runtime.wire.format import Message
from runtime.wire.handle import client_of, describe
from runtime.wire.messages import (
    ControlReply,
    ControlRequest,
    ErrorInfo,
    GenerateRequest,
    RequestFailed,
    TokenizedRequest,
)
from runtime.wire.outbox import KeepingOutbox
from runtime.wire.transport import Outbox
from tokenizer_proc.sequences import sequence_handles

logger = logging.getLogger(__name__)

MAX_TURN_BYTES = 1 << 21
"""Number of bytes after which the scheduler's next message waits for the next turn. They take 2 ms."""
MESSAGE_BYTES = 1024


class Routes:
    """Outboxes to the scheduler, and to the detokenizer of each client, which sends every answer."""

    def __init__(self, scheduler: Outbox, detokenizers: Sequence[Outbox]) -> None:
        """Send to these outboxes. detokenizers: in the order of their indexes."""
        self._to_scheduler = scheduler
        self._num_bytes = 0
        """Number of bytes sent to the scheduler in this turn, about."""
        self.scheduler = KeepingOutbox[Message](self._send_to_scheduler)
        self._detokenizers = [KeepingOutbox[Message](outbox.send) for outbox in detokenizers]

    def begin_turn(self) -> None:
        self._num_bytes = 0

    @property
    def is_paused(self) -> bool:
        """True if messages are kept only because enough was sent in this turn."""
        return bool(self.scheduler) and self._num_bytes >= MAX_TURN_BYTES

    def _send_to_scheduler(self, message: Message) -> bool:
        if self._num_bytes >= MAX_TURN_BYTES or not self._to_scheduler.send(message):
            return False
        self._num_bytes += _size_of(message)
        return True

    @property
    def is_keeping(self) -> bool:
        """True if a message could not be sent yet."""
        return bool(self.scheduler or any(self._detokenizers))

    def flush(self) -> bool:
        """Send the kept messages. Returns True if none is left."""
        has_sent_all = self.scheduler.flush()
        for route in self._detokenizers:
            has_sent_all &= route.flush()
        return has_sent_all

    def to_client(self, client: int) -> KeepingOutbox[Message]:
        """Return the outbox to the detokenizer that answers this client."""
        return self._detokenizers[client % len(self._detokenizers)]

    def refuse(self, request: GenerateRequest, error: RequestError | str) -> None:
        """Answer every sequence of a request with an error. A text stands for an internal error."""
        info = ErrorInfo(error) if isinstance(error, str) else error_info(error)
        route = self.to_client(client_of(request.handle))
        for handle in sequence_handles(request):
            route.send(RequestFailed(handle, info))

    def fail(self, request: GenerateRequest, error: Exception) -> None:
        """Answer every sequence of a request for which the tokenizer has raised an error of its own."""
        _log_failure(describe(request.handle), error)
        self.refuse(request, "the tokenizer failed on this request")

    def fail_control(self, message: ControlRequest, error: Exception) -> None:
        """Answer a control call for which the tokenizer has raised an error of its own."""
        _log_failure(message.op, error)
        self.refuse_control(message, RequestError(f"the tokenizer failed on this {message.op}"))

    def refuse_control(self, message: ControlRequest, error: RequestError) -> None:
        """Answer a control call with an error."""
        self.answer(message, error_info(error), ok=False)

    def answer(self, message: ControlRequest, body: object, *, ok: bool = True) -> None:
        """Answer a control call."""
        raw = msgspec.Raw(msgspec.msgpack.encode(body))
        self.to_client(message.client).send(ControlReply(message.client, message.number, raw, ok=ok))


def _log_failure(what: str, error: Exception) -> None:
    # An exception's text may quote the prompt, so only its kind and its place are logged.
    place = traceback.extract_tb(error.__traceback__)[-1]
    logger.error("%s failed: %s at %s:%s", what, type(error).__name__, place.filename, place.lineno)


def _size_of(message: Message) -> int:
    """Return about how many bytes are written for a message to the scheduler."""
    if not isinstance(message, TokenizedRequest):
        return MESSAGE_BYTES
    num_bytes = len(message.input_ids) + len(message.output_ids) + len(message.prediction_ids)
    if message.guide is not None:
        num_bytes += len(message.guide.text)
    # Stop strings are written twice.
    return MESSAGE_BYTES + num_bytes + 2 * len(message.stream_open)
