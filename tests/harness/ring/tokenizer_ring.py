"""Tokenizer loop between channels in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from runtime.ring.suspects.in_hand import TextsInHand
from runtime.ring.tenants import Tenants
from runtime.text.tokenizer import Tokenizer
from runtime.wire.format import IntArray
from runtime.wire.handle import make_handle
from runtime.wire.messages import GenerateRequest, RequestFailed
from runtime.wire.sampling_params import SamplingParams
from runtime.wire.status_page import ProcessStatus
from runtime.wire.transport import MemoryChannel
from tokenizer_proc.admission import QueueAdmission
from tokenizer_proc.arrivals import MAX_PIECE_CHARS
from tokenizer_proc.long_texts import MAX_MEDIUM_CHARS
from tokenizer_proc.loop import TokenizerLoop
from tokenizer_proc.receipt import Receipt
from tokenizer_proc.validation import QueueBound, Validator

CLIENT = 77
LONG_TEXT = "x" * (MAX_MEDIUM_CHARS + 1)
MEDIUM_TEXT = "x" * (MAX_PIECE_CHARS + 1)
"""Shortest text that is left to a thread."""


class Ring:
    """A tokenizer loop between channels in memory."""

    def __init__(
        self,
        loaded: Any,
        *,
        scheduler_room: int = 1000,
        context_length: int = 1 << 20,
        num_detokenizers: int = 1,
        validator: Validator | None = None,
        in_hand: TextsInHand | None = None,
        on_encoded: Callable[[], None] = lambda: None,
    ) -> None:
        self.inbox = MemoryChannel("tokenizer_in")
        self.scheduler = MemoryChannel("scheduler_in", capacity=scheduler_room)
        self.detokenizers = [MemoryChannel("detokenizer_in") for _ in range(num_detokenizers)]
        self.status = ProcessStatus()
        self.num_sent_elsewhere = 0
        self.is_recovering = False
        self.has_tenants = False
        self.tenants = Tenants()
        self.now = Receipt(1000.0, 2_000_000_000.0)
        self.loop = TokenizerLoop(
            inbox=self.inbox,
            scheduler=self.scheduler,
            detokenizers=self.detokenizers,
            tokenizer=loaded,
            validator=validator or Validator(4096, context_length),
            admission=QueueAdmission(
                QueueBound(max_waiting=100, max_waiting_of_client=100, max_running=100),
                lambda: self.status,
                num_sent_elsewhere=lambda: self.num_sent_elsewhere,
                is_recovering=lambda: self.is_recovering,
                has_tenants=lambda: self.has_tenants,
            ),
            secret=b"k" * 32,
            tenant_named=lambda name: self.tenants.named(name),
            in_hand=in_hand,
            clock=lambda: self.now,
            on_encoded=on_encoded,
        )

    def send(self, *messages: Any) -> None:
        for message in messages:
            assert self.inbox.send(message)

    def wait_for_long(self) -> None:
        """Let the threads encode what they have."""
        for long in self.loop._long:
            long.ids.exception(timeout=10)

    def finish(self) -> list[Any]:
        """Take turns until nothing is left to do. Returns what the scheduler got."""
        received = []
        while True:
            has_more = self.loop.turn()
            received += self.scheduler.drain()
            if not has_more and not self.loop.is_busy:
                return received
            self.wait_for_long()

    def refusals(self) -> list[RequestFailed]:
        return [refused for channel in self.detokenizers for refused in channel.drain()]


def handle(seq: int, client: int = CLIENT) -> bytes:
    return make_handle(client, seq)


def request(seq: int, **fields: Any) -> GenerateRequest:
    return GenerateRequest(**{"handle": handle(seq), "sampling": SamplingParams(seed=1), **fields})


def passed_on(ring: Ring, *messages: Any) -> list[Any]:
    """Return the messages that the scheduler gets of these in one turn."""
    ring.send(*messages)
    ring.loop.turn()
    return ring.scheduler.drain()


def refusal(ring: Ring, bad: GenerateRequest) -> RequestFailed:
    """The one refusal of a request for one sequence."""
    assert passed_on(ring, bad) == []
    (refused,) = ring.refusals()
    return refused


class GatedTokenizer(Tokenizer):
    """Encodes long texts only after `gate` is opened."""

    def __init__(self, loaded: Tokenizer, min_chars: int = MAX_MEDIUM_CHARS + 1) -> None:
        """min_chars: number of characters of a long text."""
        super().__init__(loaded._backend, loaded._open_wrapper)
        self._min_chars = min_chars
        self.gate = threading.Event()

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[IntArray]:
        if len(texts[0]) >= self._min_chars:
            assert self.gate.wait(10)
        return super().encode_batch(texts, add_special_tokens=add_special_tokens)
