"""The detokenizer's work loop: takes token batches and sends output batches.

It answers each live sequence with exactly one terminal message. It never waits for a receiver: messages that
the scheduler or a client has no room for are kept and tried again.
"""

from __future__ import annotations

import logging
import traceback
from array import array
from collections.abc import Callable, Sequence

import msgspec

from detokenizer_proc.clients import Clients, ConnectedClient
from detokenizer_proc.live_sequences import Live, LiveSequences
from detokenizer_proc.output_queues import OutputQueues
from detokenizer_proc.scheduler_link import SchedulerOutbox, token_columns
from detokenizer_proc.text_stream import Refusal, TextStream
from detokenizer_proc.timelines import Timelines, stamped
from runtime.base.errors import RequestError
from runtime.ring.suspects.in_hand import StreamsInHand
from runtime.text.codec import Decoders
from runtime.wire.error_info import error_info
from runtime.wire.handle import attempt_of, client_of, describe
from runtime.wire.hypotheses import HypothesisSoFar
from runtime.wire.messages import (
    Closed,
    ControlReply,
    ControlRequest,
    ErrorInfo,
    RequestFailed,
    StreamOpen,
    TensorBatch,
    TokenBatch,
    TokenLogprobs,
)
from runtime.wire.transport import DECODE_ERRORS, BadFrames, Frame, Framed, Inbox, Outbox

logger = logging.getLogger(__name__)

MAX_DRAIN = 256
# Bytes of prompt logprobs that are kept for the next piece of an output: a client unpacks them in about 10
# ms, for which all its other callers wait.
MAX_KEPT_BYTES = 1 << 18
# Number of tokens after which output is sent although the caller does not stream: the client keeps the
# pieces, so at most one piece is generated again when a process dies, and the memory here does not grow with
# the length of an output.
PIECE_TOKENS = 64
CAME_TO_AN_END = frozenset({"stop", "length", "stop_string"})
"""Reasons of the end of a sequence that has all of its text."""
LAGGED = "the client did not read its output for too long"


class DetokenizerLoop:
    """Work loop of the process; call `turn` repeatedly. Times are in seconds on one monotonic clock."""

    def __init__(
        self,
        *,
        inbox: Inbox,
        scheduler: Outbox,
        clients: Clients,
        decoders: Decoders,
        eos_token_ids: tuple[int, ...],
        slow_reader_timeout_s: float,
        piece_tokens: int = PIECE_TOKENS,
        stream_interval: int = 1,
        engine_epoch: Callable[[], int] = lambda: 0,
        in_hand: StreamsInHand | None = None,
    ) -> None:
        """piece_tokens: number of tokens sent at a time for requests that are not streamed. stream_interval:
        the same for those that are, after their first token. engine_epoch: returns the epoch of the running
        engine; 0: unknown, so every engine is believed. in_hand: shows the stream that is worked on; None: it
        is not shown.
        """
        self._inbox = inbox
        self._scheduler = SchedulerOutbox(scheduler.send)
        self._clients = clients
        self._decoders = decoders
        self._eos_token_ids = frozenset(eos_token_ids)
        self._sequences = LiveSequences()
        self._live = self._sequences.by_handle
        self._outputs = OutputQueues(clients, slow_reader_timeout_s)
        self._piece_tokens = piece_tokens
        self._stream_interval = stream_interval
        self._shown_epoch = engine_epoch
        self._in_hand = in_hand or StreamsInHand()
        self._engine_epoch = 0
        """Epoch of the newest engine that was seen."""
        self._decode_open = msgspec.msgpack.Decoder(StreamOpen).decode
        self._bad_batches = BadFrames("TokenBatch")
        self._timelines = Timelines()
        """Timelines of sampled sequences that have ended."""
        self.num_received = 0
        """Number of messages received from scheduler and tokenizers since the start."""
        self._now = 0.0
        """Time at which the turn began."""

    @property
    def is_busy(self) -> bool:
        """True if there is work that no socket will signal."""
        return bool(self._outputs or self._scheduler)

    @property
    def num_live(self) -> int:
        return len(self._live)

    def turn(self, now: float, *, have_clients_sent: bool = True) -> None:
        """Handle the messages that have arrived, and send what can be sent. Never blocks. have_clients_sent:
        False if no message of a client had come a moment ago. Those that have come since are then read in the
        next turn, or before a check for silent clients.
        """
        self._now = now
        if have_clients_sent or self._clients.is_check_due(now):
            self._clients.receive(now)
        self._note_engine(self._shown_epoch())
        for message in self._inbox.drain(MAX_DRAIN):
            self.num_received += 1
            self._handle(message)
            self._in_hand.rest()
        self._outputs.deliver(now)
        self._clients.maintain(now)
        lagging = self._outputs.cut_off_slow_readers(now)
        if lagging:
            self._end_lagged(lagging)
        self._forget_gone_clients()
        self._scheduler.flush()

    def _handle(self, message: object) -> None:
        if isinstance(message, TokenBatch):
            if message.epoch != self._engine_epoch and not self._is_of_this_engine(message.epoch):
                return
            for raw in message.opened:
                self._open(raw)
            for record in message.prompt_logprobs:
                self._take_prompt_logprobs(record)
            if message.tokens:
                self._take_tokens(message)
            for hypothesis in message.shown:
                self._show(hypothesis)
            for record in message.logprobs:
                self._take_logprobs(record)
            for closed in message.closed:
                self._close(closed)
        elif isinstance(message, RequestFailed):
            self._refuse(message)
        elif isinstance(message, ControlReply):
            self._outputs.put_reply(message)
        elif isinstance(message, ControlRequest):
            kept, label = self._timelines, message.label
            found = kept.of(label) if label else kept.after(message.after)
            body = msgspec.Raw(msgspec.msgpack.encode(found))
            self._outputs.put_reply(ControlReply(message.client, message.number, body))
        elif isinstance(message, Framed) and isinstance(message.message, TensorBatch):
            self._take_tensors(message.message, message.frames)
        else:
            self._bad_batches.add(ValueError(f"no use for a {type(message).__name__}"))

    # -- one sequence ---------------------------------------------------------------------------------------

    def _open(self, raw: msgspec.Raw) -> None:
        try:
            opened = self._decode_open(raw)
        except DECODE_ERRORS as error:
            self._bad_batches.add(error)
            return
        handle = opened.handle
        client = self._clients.get(client_of(handle))
        if client is None:
            self._scheduler.abort((handle,))
            return
        if not self._drop_lower_attempt(handle):
            return
        try:
            place = self._in_hand.take(handle, opened.content)
            tail = array("i", opened.prompt_tail)
            decoder = self._decoders.open(tail, skip_special_tokens=opened.skip_special_tokens)
            piece_tokens = self._stream_interval if opened.stream else self._piece_tokens
            live = Live(TextStream(opened, decoder, self._decoders.text_of, piece_tokens), client, place)
        except RequestError as error:
            self._scheduler.abort((handle,))
            self._outputs.put(client, Refusal(handle, error_info(error)))
            return
        except Exception as error:
            self._log_failure(handle, error)
            self._scheduler.abort((handle,))
            self._outputs.put(client, Refusal(handle, ErrorInfo("the detokenizer failed on this sequence")))
            return
        self._sequences.add(live)
        if opened.resume is not None:
            self._replay(live, opened)

    def _note_engine(self, epoch: int) -> None:
        """Handle the start of another engine: forget the sequences of the earlier one, without terminal
        messages. Their clients submit them again as further attempts.
        """
        if epoch <= self._engine_epoch:
            return
        self._engine_epoch = epoch
        for handle in list(self._live):
            self._drop(handle)

    def _is_of_this_engine(self, epoch: int) -> bool:
        """Return True if the engine of this epoch may be believed. Messages of an earlier engine are dropped,
        because its sequences are submitted again. No engine sends anything before the status page shows it.
        """
        self._note_engine(self._shown_epoch() or epoch)
        if epoch > self._engine_epoch:
            self._bad_batches.add(ValueError(f"epoch {epoch}, the engine's is {self._engine_epoch}"))
        return epoch == self._engine_epoch

    def _drop_lower_attempt(self, handle: bytes) -> bool:
        """Drop a lower attempt of the sequence, without a terminal message. Returns False if the live one is
        not lower.
        """
        other = self._sequences.attempt_of(handle)
        if other is None:
            return True
        if attempt_of(other) >= attempt_of(handle):
            return False
        self._drop(other)
        return True

    def _replay(self, live: Live, opened: StreamOpen) -> None:
        resume = opened.resume
        assert resume is not None
        try:
            output_ids = array("i", resume.output_ids)
            is_matched = live.stream.replay(output_ids, resume.num_chars, resume.cumulative_logprob)
        except Exception as error:
            self._fail(live, error)
            return
        if live.stream.num_missing_chars or live.stream.num_tokens < len(output_ids):
            self._scheduler.abort((opened.handle,))
            self._end(live, ErrorInfo("resume: the ids give other text", "invalid_value", "resume", 400))
            return
        if is_matched:
            self._scheduler.tell_matched(opened.handle, live.stream.num_tokens)
        if live.stream.stream and live.stream.has_news():
            self._outputs.put(live.client, live.stream)

    def _take_tokens(self, batch: TokenBatch) -> None:
        """Give every sequence its new tokens. This loop is the cost of each step."""
        try:
            rows, stops = token_columns(batch)
        except ValueError as error:
            self._bad_batches.add(error)
            return
        lives, put = self._live, self._outputs.put
        show = self._in_hand.work_on if self._in_hand.is_shown else None
        for index, ((handle,), token, (id_bytes,)) in enumerate(rows):
            live = lives.get(handle)
            if live is None:
                continue
            stream, client, place = live
            if stream.matched is not None:
                continue  # output after a stop string is dropped
            if show is not None:
                show(place)
            try:
                if stops and index in stops:
                    stream.push_stop_token(token, id_bytes)
                elif stream.push(token, id_bytes):
                    self._scheduler.tell_matched(handle, stream.num_tokens)
            except Exception as error:
                self._fail(live, error)
                continue
            if stream.num_tokens >= stream.due_at and not stream.is_queued:
                put(client, stream)

    def _show(self, hypothesis: HypothesisSoFar) -> None:
        live = self._live.get(hypothesis.handle)
        if live is not None:
            self._in_hand.work_on(live.place)
            live.stream.show(hypothesis.tokens)
            self._outputs.put(live.client, live.stream)

    def _take_prompt_logprobs(self, record: TokenLogprobs) -> None:
        live = self._live.get(record.handle)
        if live is None:
            return
        stream, client, place = live
        self._in_hand.work_on(place)
        try:
            stream.add_prompt_logprobs(record)
        except Exception as error:
            self._fail(live, error)
            return
        if stream.stream or stream.num_prompt_bytes > MAX_KEPT_BYTES:
            self._outputs.put(client, stream)
        self._end_if_unread(client)

    def _take_tensors(self, batch: TensorBatch, frames: Sequence[Frame]) -> None:
        clients: dict[ConnectedClient, None] = {}
        for entry, frame in zip(batch.entries, frames, strict=True):
            live = self._live.get(entry.handle)
            if live is None:
                continue
            stream, client, _ = live
            if stream.matched is not None and entry.name.startswith("generation_"):
                # A row of an additional output belongs to the token before the one that it came with.
                num_kept = stream.num_tokens - (entry.name != "generation_logits")
                if entry.start >= num_kept:
                    continue  # it came with a token after the stop string
            self._outputs.put_tensor(client, entry, frame)
            clients[client] = None
        for client in clients:
            self._end_if_unread(client)

    def _take_logprobs(self, record: TokenLogprobs) -> None:
        live = self._live.get(record.handle)
        if live is None:
            return
        self._in_hand.work_on(live.place)
        try:
            live.stream.add_logprobs(record)
        except Exception as error:
            self._fail(live, error)

    def _close(self, closed: Closed) -> None:
        live = self._live.get(closed.handle)
        if live is None:
            return
        self._sequences.remove(closed.handle)
        self._in_hand.work_on(live.place)
        closed = stamped(closed, self._now)
        try:
            live.stream.close(closed, self._eos_token_ids)
        except Exception as error:
            self._fail(live, error)
            return
        if live.stream.finish is not None and closed.trace is not None:
            self._timelines.add(live.stream.label, closed.handle, live.stream.finish)
        if closed.reason in CAME_TO_AN_END:
            self._in_hand.finish(live.place)
        live.client.num_ended_bytes += live.stream.num_ended_bytes
        self._outputs.put(live.client, live.stream)

    def _refuse(self, failed: RequestFailed) -> None:
        client = self._clients.get(client_of(failed.handle))
        if client is not None and self._drop_lower_attempt(failed.handle):
            self._outputs.put(client, Refusal(failed.handle, failed.error))

    def _fail(self, live: Live, error: Exception) -> None:
        """End a sequence after an internal error; others continue."""
        handle = live.stream.handle
        self._log_failure(handle, error)
        self._end(live, ErrorInfo("the detokenizer failed on this sequence"))
        self._scheduler.abort((handle,))

    def _log_failure(self, handle: bytes, error: Exception) -> None:
        # An exception's text may quote the output, so only its kind and its place are logged.
        place = traceback.extract_tb(error.__traceback__)[-1]
        name = type(error).__name__
        logger.error("%s failed: %s at %s:%s", describe(handle), name, place.filename, place.lineno)

    def _end(self, live: Live, error: ErrorInfo) -> None:
        """End a sequence with an error from this process."""
        self._sequences.remove(live.stream.handle)
        live.stream.fail(error)
        self._outputs.put(live.client, live.stream)

    def _drop(self, handle: bytes) -> None:
        """Forget a sequence without a terminal message, because a further attempt continues or no client
        waits for it.
        """
        live = self._live[handle]
        self._sequences.remove(handle)
        self._outputs.drop_tensors(live.client, {handle})

    # -- clients that do not read, or are gone ---------------------------------------------------------------

    def _end_if_unread(self, client: ConnectedClient) -> None:
        """End the sequences whose raw logits or prompt logprobs wait for a client, if they are too many."""
        if client.blocked_since is None:
            return
        prompt_bytes = {handle: self._live[handle].stream.num_prompt_bytes for handle in client.handles}
        handles = self._outputs.too_large(client, prompt_bytes)
        if handles:
            self._end_lagged(handles)
            self._outputs.drop_tensors(client, handles)

    def _end_lagged(self, handles: list[bytes]) -> None:
        self._scheduler.abort(handles)
        for handle in handles:
            self._end(self._live[handle], ErrorInfo(LAGGED, "lagged", None, 408))

    def _forget_gone_clients(self) -> None:
        for client in self._clients.take_gone():
            handles = list(client.handles)
            for handle in handles:
                self._sequences.remove(handle)
            self._outputs.forget(client)
            # Abort these handles only: the client may send its other sequences again by another connection,
            # and those have to go on.
            self._scheduler.abort(handles)
