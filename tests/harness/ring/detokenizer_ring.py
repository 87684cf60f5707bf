"""Detokenizer loop between channels in memory, with a client that the test plays."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
import numpy as np

from detokenizer_proc.clients import Clients
from detokenizer_proc.loop import DetokenizerLoop
from detokenizer_proc.router import Arrival, Delivery, PeerChannel
from runtime.ring.suspects.in_hand import StreamsInHand
from runtime.ring.tenants import OWNER
from runtime.text.incremental import DecoderFactory
from runtime.text.tokenizer import Tokenizer
from runtime.wire.format import PROTOCOL_VERSION, pack_ids, unpack_ids
from runtime.wire.handle import make_handle
from runtime.wire.messages import (
    UNIONS,
    Closed,
    CloseReason,
    Hello,
    HelloAck,
    OutputBatch,
    Ping,
    SequenceOutput,
    StreamOpen,
    TensorBatch,
    TokenBatch,
    TokenLogprobs,
)
from runtime.wire.transport import SCHEMA, Frame, MemoryChannel, MessageCodec

EOS = 0
SLOW_S = 120.0
EPOCH = 3
SECRET = b"k" * 32
RAW = msgspec.msgpack.Encoder().encode


class FakePeers:
    """The clients' side of the socket. A peer in `full` does not read, one in `gone` is no longer there, one
    in `remote` came over TCP, and `tenants` says with whose key; by default with the owner's.
    """

    def __init__(self) -> None:
        self.incoming: list[tuple[bytes, bytes]] = []
        self.sent: list[tuple[bytes, bytes]] = []
        self.raw: list[tuple[bytes, TensorBatch, tuple[Frame, ...]]] = []
        """Messages with raw frames behind them, which are in `sent` too: peer, message, frames."""
        self.full: set[bytes] = set()
        self.gone: set[bytes] = set()
        self.remote: set[bytes] = set()
        self.tenants: dict[bytes, str] = {}

    def is_local(self, peer: bytes) -> bool:
        return peer not in self.remote

    def drain(self, limit: int) -> list[Arrival]:
        frames, self.incoming = self.incoming, []
        return [Arrival(peer, frame, self.tenants.get(peer, OWNER)) for peer, frame in frames]

    def send(self, peer: bytes, frame: bytes, more: Sequence[Frame] = ()) -> Delivery:
        if peer in self.gone:
            return Delivery.GONE
        if peer in self.full:
            return Delivery.FULL
        self.sent.append((peer, frame))
        if more:
            self.raw.append(
                (peer, MessageCodec(UNIONS["client_out"], EPOCH).decode(frame, any_epoch=True), tuple(more))
            )
        return Delivery.SENT


decoders_of = cache(DecoderFactory)


class Ring:
    """A detokenizer loop between channels in memory, with one client connected."""

    def __init__(
        self,
        loaded: Tokenizer,
        channel: PeerChannel | None = None,
        engine_epoch: int = 0,
        stream_interval: int = 1,
        in_hand: StreamsInHand | None = None,
    ) -> None:
        """`channel` replaces the fake peers; no client is connected then. `engine_epoch`: that the ring shows
        and steps have; 0: it shows none. `stream_interval`: tokens of a stream that go out together.
        """
        self.tokenizer = loaded
        self.inbox = MemoryChannel("detokenizer_in")
        self.scheduler = MemoryChannel("scheduler_in")
        self.peers = FakePeers()
        self.loop = DetokenizerLoop(
            inbox=self.inbox,
            scheduler=self.scheduler,
            clients=Clients(channel or self.peers, EPOCH, SECRET),
            decoders=decoders_of(loaded),
            eos_token_ids=(EOS,),
            slow_reader_timeout_s=SLOW_S,
            stream_interval=stream_interval,
            engine_epoch=lambda: engine_epoch,
            in_hand=in_hand,
        )
        self.now = 0.0
        self.client = 0 if channel else self.connect(b"peer")
        self.outputs: list[SequenceOutput] = []
        self.num_batches = 0
        self._step = 0
        self._engine_epoch = engine_epoch

    def connect(self, peer: bytes) -> int:
        hello = MessageCodec(UNIONS["client_in"], 0).encode(Hello(PROTOCOL_VERSION, SCHEMA.hex()))
        self.peers.incoming.append((peer, hello))
        self.loop.turn(self.now)
        ack = self.received(peer)[-1]
        assert isinstance(ack, HelloAck)
        return ack.client

    def say(self, message: Hello | Ping, peer: bytes = b"peer") -> None:
        """Let the peer send something, to be read in the next turn."""
        self.peers.incoming.append((peer, MessageCodec(UNIONS["client_in"], EPOCH).encode(message)))

    def received(self, peer: bytes = b"peer") -> list[Any]:
        decode = MessageCodec(UNIONS["client_out"], EPOCH).decode
        messages = [decode(frame) for to, frame in self.peers.sent if to == peer]
        self.peers.sent = [(to, frame) for to, frame in self.peers.sent if to != peer]
        return messages

    def handle(self, seq: int = 0, attempt: int = 0) -> bytes:
        return make_handle(self.client, seq, 0, attempt)

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode_batch([text])[0].tolist()
        return ids

    def step(self, *tokens: tuple[bytes, int], opened: tuple[StreamOpen, ...] = (), **fields: Any) -> None:
        """One step of the scheduler and one turn of the loop."""
        self._step += 1
        self.inbox.send(
            TokenBatch(
                self._step,
                b"".join(handle for handle, _ in tokens),
                pack_ids([token for _, token in tokens]),
                opened=tuple(msgspec.Raw(RAW(stream)) for stream in opened),
                epoch=self._engine_epoch,
                **fields,
            )
        )
        self.turn()

    def turn(self) -> None:
        self.loop.turn(self.now)
        for message in self.received():
            if isinstance(message, OutputBatch):
                self.num_batches += 1
                self.outputs += message.outputs

    def open(self, handle: bytes, *, stream: bool = True, **fields: Any) -> bytes:
        self.step(opened=(StreamOpen(handle, 5, pack_ids([5]), stream=stream, **fields),))
        return handle

    def generate(self, handle: bytes, text: str) -> None:
        for token in self.ids(text):
            self.step((handle, token))

    def close(self, handle: bytes, reason: CloseReason = "length", **fields: Any) -> None:
        self.step(closed=(Closed(handle, reason, **fields),))

    def text(self, handle: bytes) -> str:
        return "".join(output.text for output in self.outputs if output.handle == handle)

    def token_ids(self, handle: bytes) -> list[int]:
        packed = b"".join(output.token_ids for output in self.outputs if output.handle == handle)
        ids: list[int] = unpack_ids(packed).tolist()
        return ids

    def terminal(self, handle: bytes) -> Any:
        """The one terminal, which must be the sequence's last output."""
        outputs = [output for output in self.outputs if output.handle == handle]
        assert [output for output in outputs if output.finish is not None] == outputs[-1:]
        return outputs[-1].finish


def logprobs(handle: bytes, values: list[float], num_top: int = 2) -> TokenLogprobs:
    top = [v for value in values for v in [value - n for n in range(num_top)]]
    ids = [n for _ in values for n in range(num_top)]
    return TokenLogprobs(handle, packed(values), pack_ids(ids), packed(top))


def packed(values: list[float]) -> bytes:
    return np.array(values, np.float32).tobytes()
