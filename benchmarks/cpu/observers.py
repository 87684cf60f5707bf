"""Cost of observation for served requests: `python -m benchmarks.cpu.observers`.

One launch of the demo model, with HTTP streams that never run dry, in turns: without observers; with ten
viewers that poll as the page does; with every request sampled and its trace sent to a collector. Prints for
each turn tokens per second, and tokens per second of the launch's CPU time, with medians of the ratios to the
turn without observers in the same round. The second figure is more reliable if the machine has other work.
Then it prints, for each process, the CPU time of a request without observers, and how much more the others
used: medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import selectors
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any, NamedTuple

from benchmarks.process_cpu import cpu_by_role
from benchmarks.server import Server, launched

VIEW_EVERY_S = 0.5
"""Polling interval of the page, in seconds."""
DRAIN_S = 0.5
TURNS = ("nobody", "viewers", "sampled")
SPAWN = multiprocessing.get_context("spawn")
TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def request(path: str, body: Any = None, *, headers: str = "", closes: bool = False) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{headers}"
    head += "Connection: close\r\n" if closes else ""
    if data:
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    return head.encode() + b"\r\n" + data


def load(port: int, num_streams: int, num_tokens: int, orders: Connection) -> None:
    """Keep that many streams going. Answer each order, which says whether to sample, with the number of
    tokens since the last one.
    """
    body = {
        "prompt": "import os\n\n\ndef main(",
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    is_sampled, num_events, ends = False, 0, dict[socket.socket, bytes]()
    selector = selectors.DefaultSelector()

    def begin(connection: socket.socket) -> None:
        headers = f"traceparent: 00-{TRACE_ID}-{SPAN_ID}-0{int(is_sampled)}\r\n"
        connection.sendall(request("/v1/completions", body, headers=headers))

    for _ in range(num_streams):
        connection = socket.create_connection(("127.0.0.1", port))
        selector.register(connection, selectors.EVENT_READ)
        begin(connection)
    selector.register(orders, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is orders:
                order = orders.recv()
                if order is None:
                    return
                orders.send(num_events)
                is_sampled, num_events = order, 0
                continue
            assert isinstance(key.fileobj, socket.socket)
            connection = key.fileobj
            data = connection.recv(1 << 16)
            assert data, "the server has closed a stream"
            num_events += data.count(b'"text":')
            seen = ends.get(connection, b"") + data
            ends[connection] = seen[-8:]
            if b"[DONE]" in seen:
                ends[connection] = b""
                begin(connection)


def view(port: int, stop: Event) -> None:
    """Poll as a page that shows the ring does, until `stop`."""
    while not stop.is_set():
        for path in ("/stats", "/snapshot"):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(request(path, closes=True))
                answer = b""
                while data := connection.recv(1 << 16):
                    answer += data
                assert answer.startswith(b"HTTP/1.1 200"), answer[:200]
        stop.wait(VIEW_EVERY_S)


def views(port: int, num_viewers: int, stop: Event) -> None:
    threads = [threading.Thread(target=view, args=(port, stop)) for _ in range(num_viewers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def collect(place: Connection) -> None:
    """Collect traces, and answer each question with the number of requests that came with some."""
    sizes: list[int] = []

    class Taker(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            size = int(self.headers["Content-Length"])
            self.rfile.read(size)
            sizes.append(size)
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Taker)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    place.send(server.server_port)
    while place.recv() is not None:
        place.send((len(sizes), sum(sizes)))


@contextmanager
def process(target: Any, *arguments: Any) -> Iterator[None]:
    child = SPAWN.Process(target=target, args=arguments, daemon=True)
    child.start()
    try:
        yield
    finally:
        child.join(5)
        child.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each turn")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--viewers", type=int, default=10)
    parser.add_argument("--turns", nargs="+", choices=TURNS[1:], default=TURNS[1:], help="besides nobody's")
    given = parser.parse_args()
    here, there = SPAWN.Pipe()
    taker, its_end = SPAWN.Pipe()
    with process(collect, its_end):
        endpoint = f"http://127.0.0.1:{taker.recv()}/v1/traces"
        flags = ("--max-running-requests", str(given.streams), "--otlp-traces-endpoint", endpoint)
        with launched(*flags) as server:
            port = int(server.url.rpartition(":")[2])
            with process(load, port, given.streams, given.tokens, there):
                time.sleep(3.0)
                run(given, server, here)
                here.send(None)
        taker.send(True)
        num_messages, num_bytes = taker.recv()
        print(f"the collector has had {num_messages} messages, {num_bytes} bytes")
        taker.send(None)


def run(given: argparse.Namespace, server: Server, load_end: Connection) -> None:
    turns = ["nobody", *given.turns]
    rounds: list[dict[str, Turn]] = []
    for number in range(given.rounds):
        order = turns if number % 2 else turns[::-1]
        rounds.append({turn: measure(turn, given, server, load_end) for turn in order})
    for turn in turns:
        for words in ("tokens/s", "tokens per CPU second"):
            values = [each[turn].rate(words) for each in rounds]
            ratios = [value / each["nobody"].rate(words) for value, each in zip(values, rounds, strict=True)]
            shown = " ".join(f"{value:.0f}" for value in values)
            print(f"{turn}: {words} {shown}; ratio to nobody {statistics.median(ratios):.3f}")
    for role in sorted(rounds[0]["nobody"].cpu_s):
        shown = f"{statistics.median(each['nobody'].request_ms(role, given.tokens) for each in rounds):.3f}"
        for turn in given.turns:
            more = [
                each[turn].request_ms(role, given.tokens) - each["nobody"].request_ms(role, given.tokens)
                for each in rounds
            ]
            spread = f"{min(more):+.3f} to {max(more):+.3f}"
            shown += f", {turn} {statistics.median(more):+.3f} ({spread})"
        print(f"{role}: ms of CPU a request: {shown}")


class Turn(NamedTuple):
    num_tokens: int
    seconds: float
    cpu_s: dict[str, float]
    """CPU seconds of each process of the launch."""

    def rate(self, words: str) -> float:
        return self.num_tokens / (self.seconds if words == "tokens/s" else sum(self.cpu_s.values()))

    def request_ms(self, role: str, num_tokens: int) -> float:
        """Return the milliseconds of CPU time that a process used for each `num_tokens` tokens."""
        return 1000 * self.cpu_s[role] / self.num_tokens * num_tokens


def measure(turn: str, given: argparse.Namespace, server: Server, load_end: Connection) -> Turn:
    port = int(server.url.rpartition(":")[2])
    stop = SPAWN.Event()
    is_sampled = turn == "sampled"
    with process(views, port, given.viewers if turn == "viewers" else 0, stop):
        tell(load_end, is_sampled)
        # The running requests were begun in the turn before; wait for their end.
        time.sleep(DRAIN_S + given.tokens / 100)
        tell(load_end, is_sampled)
        began, before = time.monotonic(), cpu_by_role(server.launcher_pid)
        time.sleep(given.seconds)
        num_tokens = tell(load_end, is_sampled)
        seconds, after = time.monotonic() - began, cpu_by_role(server.launcher_pid)
        stop.set()
    return Turn(num_tokens, seconds, {role: cpu_s - before[role] for role, cpu_s in after.items()})


def tell(load_end: Connection, is_sampled: bool) -> int:
    load_end.send(is_sampled)
    num_tokens: int = load_end.recv()
    return num_tokens


if __name__ == "__main__":
    main()
