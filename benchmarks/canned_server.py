"""Server of canned answers: OpenAI completions as events, served as cheaply as possible, in order to measure
the client that reads them.

One thread, epoll, no framework. Every byte of a token is made in advance, and the texts are the
same for all requests. The server only reads max_tokens of a request.

Run: python -m benchmarks.canned_server --rate 40000; the first line that it prints is its port.
"""

from __future__ import annotations

import argparse
import contextlib
import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import PIPE, Popen
from sys import executable

import msgspec

HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
MODELS = b'{"data":[{"id":"canned"}]}'
PLAIN = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
NOT_FOUND = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
PROMPT_TOKENS = 7
TEXTS = (" the", " return", "\\n    ", "(self", " =", "ä", ' \\"', " x")
"""Texts of one token each, used in turn, as JSON spells them."""
MAX_REQUEST_BYTES = 1 << 20


class _Body(msgspec.Struct):
    max_tokens: int


class Answers:
    """Bytes of every answer: an event and an HTTP chunk for each token, with the running usage."""

    def __init__(self) -> None:
        self._tokens: list[bytes] = []

    def parts(self, num_tokens: int) -> list[bytes]:
        """Return the bytes to be written for each token. The first have the head, the last the end of the
        answer.
        """
        while len(self._tokens) < num_tokens:
            self._tokens.append(_token(len(self._tokens), "null"))
        parts = self._tokens[:num_tokens]
        usage = _chunk(_event("[]", num_tokens) + b"data: [DONE]\n\n")
        parts[-1] = _token(num_tokens - 1, '"length"') + usage + b"0\r\n\r\n"
        parts[0] = HEAD + parts[0]
        return parts


def text_of(num_tokens: int) -> str:
    """Return the text of an answer."""
    return "".join(
        msgspec.json.decode(f'"{TEXTS[index % len(TEXTS)]}"', type=str) for index in range(num_tokens)
    )


def _token(index: int, finish_reason: str) -> bytes:
    choice = (
        f'[{{"index":0,"text":"{TEXTS[index % len(TEXTS)]}","logprobs":null,'
        f'"finish_reason":{finish_reason},"stop_reason":null}}]'
    )
    return _chunk(_event(choice, index + 1))


def _event(choices: str, num_tokens: int) -> bytes:
    usage = (
        f'{{"prompt_tokens":{PROMPT_TOKENS},"completion_tokens":{num_tokens},'
        f'"total_tokens":{PROMPT_TOKENS + num_tokens},"prompt_tokens_details":{{"cached_tokens":0}}}}'
    )
    return (
        'data: {"id":"cmpl-0123456789abcdef01234567","object":"text_completion","created":1800000000,'
        f'"model":"canned","choices":{choices},"usage":{usage}}}\n\n'
    ).encode()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Connection:
    """Request, and the number of bytes of its answer that were written."""

    def __init__(self, sock: socket.socket, answers: Answers) -> None:
        self.sock = sock
        self._answers = answers
        self._request = b""
        self._parts: list[bytes] = []
        self._next = 0
        self._rest: bytes = b""
        """Rest of the last part, for which the socket had no room."""

    def try_read(self) -> bool:
        """Read what has arrived. Returns True when the request is complete. Raises ConnectionError at its
        end.
        """
        data = self.sock.recv(MAX_REQUEST_BYTES)
        if not data:
            raise ConnectionError
        self._request += data
        head, blank, body = self._request.partition(b"\r\n\r\n")
        if not blank:
            return False
        if head.startswith(b"GET"):
            is_models = head.startswith(b"GET /v1/models ")
            self._parts = [PLAIN % (len(MODELS), MODELS) if is_models else NOT_FOUND]
            return True
        length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        if len(body) < length:
            return False
        self._parts = self._answers.parts(msgspec.json.decode(body, type=_Body).max_tokens)
        return True

    def write_next(self) -> bool:
        """Write the next part, or the rest of the last one. Returns True when everything is written."""
        if not self._rest:
            self._rest = self._parts[self._next]
            self._next += 1
        try:
            self._rest = self._rest[self.sock.send(self._rest) :]
        except BlockingIOError:
            return False
        return not self._rest and self._next == len(self._parts)


class CannedServer:
    def __init__(self, rate: float) -> None:
        """rate: most tokens per second of all streams together; 0: as fast as they are read."""
        self._rate = rate
        self._answers = Answers()
        self._selector = selectors.DefaultSelector()
        self._streams: dict[Connection, None] = {}
        """Connections with more to write, in the order of arrival."""
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self.port: int = self._listener.getsockname()[1]

    def run(self) -> None:
        """Serve until the process is ended. In each turn every stream gets a token."""
        due_s = time.monotonic()
        while True:
            now = time.monotonic()
            if not self._streams:
                wait_s, due_s = None, now
            else:
                wait_s = max(0.0, due_s - now)
            for key, _ in self._selector.select(wait_s):
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.data)
            if self._streams and time.monotonic() >= due_s:
                if self._rate:
                    due_s += len(self._streams) / self._rate
                self._write_all()

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(sock, selectors.EVENT_READ, Connection(sock, self._answers))

    def _read(self, connection: Connection) -> None:
        try:
            if connection.try_read():
                # The socket is no longer polled for reading, since it answers one request.
                self._selector.unregister(connection.sock)
                self._streams[connection] = None
        except ConnectionError:
            self._selector.unregister(connection.sock)
            connection.sock.close()

    def _write_all(self) -> None:
        for connection in list(self._streams):
            with contextlib.suppress(ConnectionError):
                if not connection.write_next():
                    continue
            del self._streams[connection]
            connection.sock.close()


@contextmanager
def canned_server(rate: float = 0.0) -> Iterator[tuple[int, int]]:
    """Context manager for a server in a process of its own; gives (port, pid)."""
    command = [executable, "-m", "benchmarks.canned_server", "--rate", str(rate)]
    with Popen(command, stdout=PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline()), process.pid
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=0.0, help="tokens per second; 0: no limit")
    server = CannedServer(parser.parse_args().rate)
    print(server.port, flush=True)
    server.run()


if __name__ == "__main__":
    main()
