"""Detokenizers of the simulation: they keep all messages, and check their order."""

from __future__ import annotations

import math
from collections import Counter

import msgspec

from runtime.wire.format import unpack_floats, unpack_ids
from runtime.wire.handle import client_of
from runtime.wire.messages import Closed, ControlReply, StreamOpen, TensorBatch, TokenBatch, TokenLogprobs
from runtime.wire.transport import Framed
from tests.harness.simulation.fake_sampling import VOCAB_SIZE, fake_rank


class FakeDetokenizer:
    """Takes TokenBatches apart and holds them to invariant 1: one opening, one terminal, nothing after it."""

    def __init__(self) -> None:
        self.opened: set[bytes] = set()
        self.tokens: dict[bytes, list[int]] = {}
        self.num_batches: Counter[bytes] = Counter()
        """Batches with tokens of a sequence; a batch may have those of several steps."""
        self.logprobs: dict[bytes, list[Logprobs]] = {}
        self.prompt_logprobs: dict[bytes, list[Logprobs]] = {}
        self.logits: dict[tuple[bytes, str], list[tuple[int, bytes]]] = {}
        """By handle and name: (its number, the bytes) of each row."""
        self.closed: dict[bytes, Closed] = {}
        self.closed_at: dict[bytes, float] = {}
        self.replies: list[ControlReply] = []

    def receive(
        self, message: TokenBatch | ControlReply | Framed, now: float, number: int, num_detokenizers: int
    ) -> None:
        """Take what arrived at detokenizer `number`."""
        if isinstance(message, ControlReply):
            assert message.client % num_detokenizers == number, "an answer for another detokenizer"
            self.replies.append(message)
            return
        if isinstance(message, Framed):
            assert isinstance(message.message, TensorBatch)
            self._receive_logits(message.message, message)
            return
        for raw in message.opened:
            handle = msgspec.msgpack.decode(raw, type=StreamOpen).handle
            assert client_of(handle) % num_detokenizers == number, "a sequence of another detokenizer"
            assert handle not in self.opened, "opened twice"
            self.opened.add(handle)
            self.tokens[handle] = []
            self.logprobs[handle] = []
            self.prompt_logprobs[handle] = []
        for entry in message.prompt_logprobs:
            self._check_open(entry.handle)
            assert not self.tokens[entry.handle], "logprobs of a prompt after its output"
            rows = rows_of(entry)
            assert unpack_ids(entry.ranks).tolist() == [fake_rank(chosen) for chosen, _, _ in rows]
            self.prompt_logprobs[entry.handle] += rows
        handles = [message.handles[i : i + 16] for i in range(0, len(message.handles), 16)]
        for handle, token in zip(handles, unpack_ids(message.tokens).tolist(), strict=True):
            self._check_open(handle)
            self.tokens[handle].append(token)
        self.num_batches.update(set(handles))
        for entry in message.logprobs:
            self._check_open(entry.handle)
            self.logprobs[entry.handle] += rows_of(entry)
        for closed in message.closed:
            assert closed.handle in self.opened, "closed before its opening"
            assert closed.handle not in self.closed, "a second terminal"
            self.closed[closed.handle] = closed
            self._check_drafts(closed)
            self.closed_at[closed.handle] = now

    def _check_drafts(self, closed: Closed) -> None:
        """A step gives one token more than guesses that were right."""
        if closed.drafts is not None:
            most = len(self.tokens[closed.handle]) - self.num_batches[closed.handle]
            num_accepted = closed.drafts.num_accepted
            assert num_accepted <= min(most, closed.drafts.num_drafted), "more guesses right than tokens"

    def _check_open(self, handle: bytes) -> None:
        assert handle in self.opened, "something before its opening"
        assert handle not in self.closed, "something after the terminal"

    def _receive_logits(self, batch: TensorBatch, framed: Framed) -> None:
        for entry, frame in zip(batch.entries, framed.frames, strict=True):
            self._check_open(entry.handle)
            data = bytes(frame)
            num_positions, vocab_size = entry.shape
            assert (vocab_size, len(data)) == (VOCAB_SIZE, 4 * math.prod(entry.shape))
            size = len(data) // num_positions
            rows = [(entry.start + i, data[i * size : (i + 1) * size]) for i in range(num_positions)]
            self.logits.setdefault((entry.handle, entry.name), []).extend(rows)


Logprobs = tuple[float, list[int], list[float]]
"""Logprobs of one token: its own, the most likely ids, theirs."""


def rows_of(entry: TokenLogprobs) -> list[Logprobs]:
    chosen = unpack_floats(entry.logprobs).tolist()
    top_ids = unpack_ids(entry.top_ids).reshape(len(chosen), -1).tolist()
    top = unpack_floats(entry.top_logprobs).reshape(len(chosen), -1).tolist()
    return list(zip(chosen, top_ids, top, strict=True))
