"""Host time of one detokenizer step: decode the TokenBatch, the text of every row, encode the OutputBatches.

256 streaming sequences of 4 clients, one token each per step, the demo model's tokenizer, random tokens. The
sockets are replaced by lists, everything else is the process's own loop. "hostile": an output of a's, and
stop strings of which the longest permitted ends are pending all the time, different ones in each row.
Run: python -m benchmarks.bench_detokenizer
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from detokenizer_proc.clients import Clients
from detokenizer_proc.loop import DetokenizerLoop
from detokenizer_proc.router import Arrival, Delivery
from runtime.ring.tenants import OWNER
from runtime.sampling.kinds import MAX_STOP_CHARS
from runtime.sampling.table import MAX_STOP_STRINGS
from runtime.text import tokenizer
from runtime.text.incremental import DecoderFactory
from runtime.wire.format import PROTOCOL_VERSION, pack_ids
from runtime.wire.handle import make_handle
from runtime.wire.messages import UNIONS, Hello, HelloAck, StreamOpen, TokenBatch
from runtime.wire.transport import SCHEMA, Frame, MemoryChannel, MessageCodec

BAR_US = 400.0
DEMO_MODEL = Path(__file__).resolve().parent.parent / "demo" / "model"


class ListChannel:
    """Channel to the clients that keeps frames in lists."""

    def __init__(self) -> None:
        self.incoming: list[tuple[bytes, bytes]] = []
        self.sent: list[tuple[bytes, bytes]] = []

    def drain(self, limit: int) -> list[Arrival]:
        frames, self.incoming = self.incoming[:limit], self.incoming[limit:]
        return [Arrival(peer, frame, OWNER) for peer, frame in frames]

    def send(self, peer: bytes, frame: bytes, more: Sequence[Frame] = ()) -> Delivery:
        self.sent.append((peer, frame))
        return Delivery.SENT

    def is_local(self, peer: bytes) -> bool:
        return True


class Bench:
    def __init__(
        self,
        num_rows: int,
        num_clients: int,
        stops: Sequence[tuple[str, ...]] = ((),),
        stop_words: tuple[bytes, ...] = (),
        output: str = "",
    ) -> None:
        """stops: stop strings of each row, or of all rows. output: text that is generated over and over;
        empty: random tokens.
        """
        self.channel = ListChannel()
        self.inbox = MemoryChannel("detokenizer_in")
        text_tokenizer = tokenizer.load(DEMO_MODEL)
        self.vocab_size = text_tokenizer.vocab_size
        self.output = text_tokenizer.encode_batch([output], add_special_tokens=False)[0]
        self.loop = DetokenizerLoop(
            inbox=self.inbox,
            scheduler=MemoryChannel("scheduler_in"),
            clients=Clients(self.channel, 0, bytes(32)),
            decoders=DecoderFactory(text_tokenizer),
            eos_token_ids=(0,),
            slow_reader_timeout_s=120.0,
        )
        ids = self._connect(num_clients)
        encode = msgspec.msgpack.Encoder().encode
        handles = [make_handle(ids[row % num_clients], row) for row in range(num_rows)]
        prompt = pack_ids([5, 6, 7])
        streams = [
            StreamOpen(handle, 5, prompt, stream=True, stop=stops[row % len(stops)], stop_words=stop_words)
            for row, handle in enumerate(handles)
        ]
        self.inbox.send(TokenBatch(0, opened=tuple(msgspec.Raw(encode(stream)) for stream in streams)))
        self.loop.turn(0.0)
        assert self.loop.num_live == num_rows
        self.handles = b"".join(handles)

    def _connect(self, num_clients: int) -> list[int]:
        hello = MessageCodec(UNIONS["client_in"], 0).encode(Hello(PROTOCOL_VERSION, SCHEMA.hex()))
        self.channel.incoming = [(b"peer%d" % n, hello) for n in range(num_clients)]
        self.loop.turn(0.0)
        decode = MessageCodec(UNIONS["client_out"], 0).decode
        acks = [decode(frame) for _, frame in self.channel.sent]
        return [ack.client for ack in acks if isinstance(ack, HelloAck)]

    def run(self, num_steps: int) -> list[float]:
        """Return the time of each step in microseconds."""
        num_rows = len(self.handles) // 16
        tokens = np.random.default_rng(0).integers(3, self.vocab_size, (num_steps, num_rows), np.int32)
        if len(self.output):
            tokens[:] = np.resize(self.output, num_steps)[:, None]
        times = []
        for step in range(num_steps):
            self.inbox.send(TokenBatch(step, self.handles, tokens[step].tobytes()))
            self.channel.sent.clear()
            start = time.perf_counter_ns()
            self.loop.turn(0.0)
            times.append((time.perf_counter_ns() - start) / 1e3)
            assert self.channel.sent, "the step must have reached the clients"
        return times


def hostile(row: int) -> tuple[str, ...]:
    """Return the largest number of the longest stop strings that a request may have. Each fails to match an
    output of a's at a later place, and one never does.
    """
    mark = f"{row:03}"
    short = (f"{'a' * count}{mark}".ljust(MAX_STOP_CHARS, "b") for count in range(1, MAX_STOP_STRINGS))
    return (*short, mark.rjust(MAX_STOP_CHARS, "a"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    report: dict[str, object] = {"rows": args.rows, "clients": args.clients, "bar_us": BAR_US}
    words = tuple(pack_ids(word) for word in ([900, 901, 902], [903, 904]))
    worst = [hostile(row) for row in range(args.rows)]
    for name, stops, stop_words, output in (
        ("plain", [()], (), ""),
        ("stop_strings", [("</answer>", "import END")], (), ""),
        ("stop_words", [()], words, ""),
        ("hostile", worst, (), "a" * 64),
    ):
        bench = Bench(args.rows, args.clients, stops, stop_words, output)
        gc.freeze()
        times = bench.run(args.steps)[args.steps // 10 :]
        p50, p99 = np.percentile(times, [50, 99])
        print(f"{name:>12}: p50 {p50:6.1f} us, p99 {p99:6.1f} us, live {bench.loop.num_live}")
        report[name] = {"p50_us": round(float(p50), 1), "p99_us": round(float(p99), 1)}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
