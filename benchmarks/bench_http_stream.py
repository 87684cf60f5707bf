"""CPU time that the HTTP server spends on each streamed token: `python -m benchmarks.bench_http_stream`.

The ring is a fake that sends one token of every stream in one batch, step by step; the readers are raw
sockets of another process. Measured is the time on the CPU of the server's event loop and of the client
library's I/O thread, so nobody else's counts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import selectors
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from runtime.wire.format import pack_ids
from runtime.wire.messages import SequenceOutput
from tests.harness.http.http_front import Front, http_front
from tests.harness.ring.launched import wait_until

CHAT = {"messages": [{"role": "user", "content": "x"}]}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


class Asked(NamedTuple):
    """Path and body that the streams request, and the first piece of their answer."""

    path: str
    body: dict[str, Any]
    first: str = " word"


ASKED = {
    "completions": Asked("/v1/completions", {"prompt": "x"}),
    "chat": Asked("/v1/chat/completions", {**CHAT, "separate_reasoning": False}),
    "chat, may have reasoning": Asked("/v1/chat/completions", CHAT),
    "chat with tools": Asked("/v1/chat/completions", {**CHAT, "tools": TOOLS}),
    "reasoning": Asked("/v1/chat/completions", CHAT, "<think>"),
    "arguments of a call": Asked(
        "/v1/chat/completions",
        {**CHAT, "tools": TOOLS},
        '<tool_call>{"name": "f", "arguments": {"a": "',
    ),
    "generate": Asked("/generate", {"text": "x"}),
}
PARSERS: dict[str, Any] = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
STEP_S = 0.01
TIMEOUT_S = 60.0


def read_streams(commands: Connection) -> None:
    """Reading process: for each command, open streams and discard what arrives until the next command."""
    for port, path, body, num_streams in iter(commands.recv, None):
        data = json.dumps({**body, "stream": True}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(data)}\r\n\r\n"
        with selectors.DefaultSelector() as selector, ExitStack() as sockets:
            for _ in range(num_streams):
                connection = sockets.enter_context(socket.create_connection(("127.0.0.1", port)))
                connection.sendall(head.encode() + data)
                selector.register(connection, selectors.EVENT_READ)
            while not commands.poll():
                for key, _ in selector.select(0.05):
                    assert isinstance(key.fileobj, socket.socket)
                    key.fileobj.recv(1 << 16)
            commands.recv()


@contextmanager
def reader() -> Iterator[Connection]:
    """Start the reading process by fork. Call it before there are threads."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=read_streams, args=(theirs,))
    process.start()
    try:
        yield ours
    finally:
        ours.send(None)
        process.join()


def cpu_s(name: str) -> float:
    """Return the CPU seconds of the threads whose names begin with `name`."""
    threads = [each for each in threading.enumerate() if each.name.startswith(name)]
    clocks = [time.pthread_getcpuclockid(each.ident) for each in threads if each.ident is not None]
    return sum(map(time.clock_gettime, clocks))


def measure(front: Front, reader: Connection, asked: Asked, num_streams: int, num_steps: int) -> list[float]:
    """Return microseconds of each token, in the event loop and in the client's I/O thread."""
    seen = len(front.ring.requests)
    reader.send((front.port, asked.path, asked.body, num_streams))
    ring = front.ring
    wait_until(lambda: len(ring.requests) == seen + num_streams, TIMEOUT_S, "the streams are asked for")
    requests = ring.requests[seen:]
    outputs = [SequenceOutput(request.handle, " word", pack_ids([42])) for request in requests]
    ring.send(*(msgspec.structs.replace(output, text=asked.first) for output in outputs))
    time.sleep(0.2)
    before = [cpu_s("http-front"), cpu_s("carousel-client")]
    for _ in range(num_steps):
        ring.send(*outputs)
        time.sleep(STEP_S)
    time.sleep(0.1)
    after = [cpu_s("http-front"), cpu_s("carousel-client")]
    reader.send("close")
    wait_until(lambda: len(ring.aborted()) == len(ring.requests), TIMEOUT_S, "the streams are aborted")
    num_tokens = num_streams * num_steps
    return [(new - old) / num_tokens * 1e6 for new, old in zip(after, before, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    found: dict[str, list[list[float]]] = {name: [] for name in ASKED}
    with (
        reader() as readers,
        tempfile.TemporaryDirectory() as folder,
        http_front(Path(folder), **PARSERS) as front,
    ):
        for _ in range(args.rounds):
            for name, asked in ASKED.items():  # in turns, so that other work on the machine affects all alike
                found[name].append(measure(front, readers, asked, args.streams, args.steps))
    for name, rounds in found.items():
        loop, io = (min(column) for column in zip(*rounds, strict=True))
        print(f"{name:24} {args.streams} streams: {loop:6.1f} us a token in the loop, {io:5.1f} in I/O")


if __name__ == "__main__":
    main()
