"""CPU time of the tokenizer's loop: its longest turn, and all that a request costs, for floods of one shape.

The requests come and go through real sockets. Everything else is the process's own loop with the demo model's
tokenizer. The library's own threads are off, so a turn's CPU time is its length on a machine with
nothing else to do, and its longest piece is known on a busy one, too. "overall" includes the threads.
Run: python -m benchmarks.tokenizer.turns [--only NAME]
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from runtime.text import tokenizer
from runtime.wire.format import pack_ids
from runtime.wire.handle import make_handle
from runtime.wire.messages import ChatMessage, GenerateRequest
from runtime.wire.sampling_params import SamplingParams
from runtime.wire.status_page import ProcessStatus
from runtime.wire.transport import ZmqInbox, ZmqOutbox
from tokenizer_proc.admission import QueueAdmission
from tokenizer_proc.loop import TokenizerLoop
from tokenizer_proc.validation import QueueBound, Validator

DEMO_MODEL = Path(__file__).resolve().parents[2] / "demo" / "model"
CLIENT = 7
CONTEXT_LENGTH = 1 << 19
WORDS = ("the", "of", "and", "to", "in", "is", "that", "for", "was", "with", "not", "have", "from", "this")


def words(num_chars: int, seed: int) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choices(WORDS, k=num_chars))[:num_chars]


def marks(num_chars: int, seed: int) -> str:
    return "".join(map(chr, random.Random(seed).choices(range(33, 127), k=num_chars)))


def emojis(num_chars: int, seed: int) -> str:
    return "".join(map(chr, random.Random(seed).choices(range(0x1F300, 0x1F600), k=num_chars)))


def cjk(num_chars: int, seed: int) -> str:
    return "".join(map(chr, random.Random(seed).choices(range(0x4E00, 0x9E00), k=num_chars)))


def text_of(kind: Callable[[int, int], str], num_chars: int) -> Callable[[int], dict[str, Any]]:
    return lambda number: {"text": kind(num_chars, number)}


def chat(num_messages: int, num_chars: int) -> Callable[[int], dict[str, Any]]:
    return lambda number: {
        "messages": tuple(
            ChatMessage(("user", "assistant")[place % 2], words(num_chars, number + place))
            for place in range(num_messages)
        )
    }


def tools(num_tools: int) -> Callable[[int], dict[str, Any]]:
    definition = {
        "type": "function",
        "function": {
            "name": "f",
            "description": words(150, 0),
            "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
        },
    }
    packed = msgspec.json.encode([definition] * num_tools)
    return lambda number: {"messages": (ChatMessage("user", str(number)),), "tools": packed}


def mixed(number: int) -> dict[str, Any]:
    return {"text": words(40_000 if number % 8 == 0 else 200, number)}


def ids(num_ids: int, n: int = 1) -> Callable[[int], dict[str, Any]]:
    packed = pack_ids([5] * num_ids)
    return lambda number: {"input_ids": packed, "sampling": SamplingParams(seed=1, n=n)}


def sampled(**params: Any) -> Callable[[int], dict[str, Any]]:
    sampling = SamplingParams(seed=1, **params)
    return lambda number: {"text": "hello", "sampling": sampling}


SHAPES: dict[str, tuple[int, Callable[[int], dict[str, Any]]]] = {
    "20 ids": (800, ids(20)),
    "65,536 ids": (40, ids(65_536)),
    "65,536 ids, n = 128": (6, ids(65_536, 128)),
    "20 ids, n = 128": (60, ids(20, 128)),
    "200 characters": (800, text_of(words, 200)),
    "200 characters of any kind": (800, text_of(marks, 200)),
    "2,000 characters": (400, text_of(words, 2000)),
    "2,000 emojis": (100, text_of(emojis, 2000)),
    "8,000 characters": (100, text_of(words, 8000)),
    "8,000 emojis": (40, text_of(emojis, 8000)),
    "8,000 of CJK": (40, text_of(cjk, 8000)),
    "40,000 characters": (60, text_of(words, 40_000)),
    "40,000 of any kind": (40, text_of(marks, 40_000)),
    "60,000 emojis": (20, text_of(emojis, 60_000)),
    "60,000 of CJK": (20, text_of(cjk, 60_000)),
    "200 and 40,000 characters": (240, mixed),
    "1,000,000 characters": (3, text_of(words, 1_000_000)),
    "chat of 3 messages of 200": (300, chat(3, 200)),
    "chat of 300 messages": (60, chat(300, 2)),
    "chat of 2,000 messages": (10, chat(2000, 2)),
    "chat of 4,000 messages": (6, chat(4000, 2)),
    "chat of 4 messages of 15,000": (20, chat(4, 15_000)),
    "20 tools": (100, tools(20)),
    "200 tools": (20, tools(200)),
    "variables of 15 KB": (
        40,
        lambda number: {
            "messages": (ChatMessage("user", "x"),),
            "template_kwargs": msgspec.msgpack.encode({"x": [[]] * 4000 + ["y" * 11_000]}),
        },
    ),
    "prediction of 60,000 emojis": (
        20,
        lambda number: {"text": "hello", "prediction": emojis(60_000, number)},
    ),
    "64 bad words of 255 emojis": (20, sampled(bad_words=tuple(emojis(8, each) for each in range(64)))),
    "16 stop strings": (400, sampled(stop=tuple(emojis(256, each) for each in range(16)))),
}


class Bench:
    def __init__(self, run_dir: Path, loaded: tokenizer.Tokenizer) -> None:
        context: zmq.Context[Any] = zmq.Context()
        address = {
            name: f"ipc://{run_dir}/{name}" for name in ("tokenizer_in", "scheduler_in", "detokenizer_in")
        }
        self.inbox, self.scheduler, self.detokenizer = (
            ZmqInbox(context, each, name, 1) for name, each in address.items()
        )
        self.source, to_scheduler, to_detokenizer = (ZmqOutbox(context, each, 1) for each in address.values())
        self.loop = TokenizerLoop(
            inbox=self.inbox,
            scheduler=to_scheduler,
            detokenizers=[to_detokenizer],
            tokenizer=loaded,
            validator=Validator(4096, CONTEXT_LENGTH),
            admission=QueueAdmission(QueueBound(1 << 20, 1 << 20, 1 << 20), ProcessStatus),
            secret=b"k" * 32,
        )

    def flood(self, num_requests: int, fields: Callable[[int], dict[str, Any]]) -> tuple[float, float, int]:
        """Return the CPU seconds of the longest turn and of all of them, with the threads', and the number of
        refusals.
        """
        for number in range(num_requests):
            request = {"sampling": SamplingParams(seed=1), **fields(number)}
            while not self.source.send(GenerateRequest(make_handle(CLIENT, number), **request)):
                time.sleep(0.001)
        time.sleep(0.1)
        gc.collect()
        gc.freeze()
        longest, num_expected = 0.0, num_requests * fields(0).get("sampling", SamplingParams(seed=1)).n
        num_refused = num_sent = 0
        process_s, other_s = time.process_time(), 0.0
        while num_sent + num_refused < num_expected:
            begin_s = time.thread_time()
            has_more = self.loop.turn()
            end_s = time.thread_time()
            longest = max(longest, end_s - begin_s)
            num_refused += len(self.detokenizer.drain())
            num_sent += self._num_sent()
            other_s += time.thread_time() - end_s
            if not has_more:
                time.sleep(0.002)
        return longest, time.process_time() - process_s - other_s, num_refused

    def _num_sent(self) -> int:
        """Return how many sequences have come to the scheduler. They are not decoded: that is its work."""
        count = 0
        while True:
            try:
                self.scheduler.socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return count
            count += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parallel", action="store_true", help="leave the library's threads on")
    args = parser.parse_args()
    if not args.parallel:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
    loaded = tokenizer.load(DEMO_MODEL)
    loaded.apply_chat_template([{"role": "user", "content": "x"}])
    with tempfile.TemporaryDirectory() as run_dir:
        bench = Bench(Path(run_dir), loaded)
        print("| shape | longest turn ms | CPU ms a request | refused |\n|---|---|---|---|")
        for name, (count, fields) in SHAPES.items():
            if args.only not in name:
                continue
            rounds = [bench.flood(count, fields) for _ in range(args.rounds)]
            longest, total = (min(each[place] for each in rounds) for place in (0, 1))
            print(
                f"| {name} | {1000 * longest:.1f} | {1000 * total / count:.3f} | {rounds[0][2]} |", flush=True
            )
        bench.loop.close()


if __name__ == "__main__":
    main()
