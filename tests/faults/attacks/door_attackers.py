"""Attacks that need no key, on a server that asks for one: refusals, answers that are hardly read, ends of
connections in the middle of everything.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from itertools import count

from tests.faults.attacks.attack import Attack, endless

PATHS = (
    *(
        b"/live",
        b"/v1/models",
        b"/v1/completions",
        b"/metrics",
        b"/get_load",
        b"/openapi.json",
        b"/flush_cache",
    ),
    *(
        b"/",
        b"//v1/models",
        b"/v1/../metrics",
        b"/v1%2Fmodels",
        b"/%6cive",
        b"/live/",
        b"/live%0a",
        b"/nothing",
    ),
    *(b"*", b"http://x/v1/models", b"http://[::1]:1/live"),
)
METHODS = (b"GET", b"HEAD", b"OPTIONS", b"TRACE", b"POST", b"PUT", b"DELETE", b"PATCH")
FIELDS = (
    b"",
    b"Authorization: Bearer \r\n",
    b"Authorization: Bearer " + b"k" * 30_000 + b"\r\n",
    b"Authorization: Bearer " + b"\xff\xfe" * 8000 + b"\r\n",
    b"authorization: Bearer a\r\nAUTHORIZATION: Bearer b\r\nX-Api-Key: c\r\n",
    b"X-Api-Key: " + b"," * 20_000 + b"\r\n",
    b"Origin: http://evil\r\nAccess-Control-Request-Method: POST\r\n",
    b"Expect: 100-continue\r\nContent-Length: 9000000\r\n",
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAA\r\n",
    b"X-Forwarded-For: " + b"1.2.3.4, " * 3000 + b"\r\nX-Request-Id: " + b"r" * 500 + b"\r\n",
)
REFUSED = tuple(
    b"%b %b HTTP/1.1\r\nHost: x\r\n%b\r\n" % (method, path, field)
    for method in METHODS
    for path in PATHS
    for field in FIELDS
)
LARGEST_FILE = b"GET /page/vendor/uplot.js HTTP/1.1\r\nHost: x\r\n\r\n"
ESCAPES = b"GET /" + b"%61" * 10_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n"
SEEDS = count()
NUM_OF_THREAD = 40
SMALLEST_BUFFER = 1
"""Bytes that the kernel raises to the fewest that it allows."""
READ_S = 1.0


def refusals(attack: Attack, _: int) -> None:
    """Ask for every path by every method, without a key or with a wrong one."""
    first = next(SEEDS) * 16 % len(REFUSED)
    attack.send(endless(*REFUSED[first : first + 16]), stays_s=0.1)


def escapes(attack: Attack, _: int) -> None:
    """Ask for paths that are long to decode."""
    attack.send(endless(ESCAPES), stays_s=0.1)


def slow_readers(attack: Attack, _: int) -> None:
    """Hold connections that ask for the page's largest file and for refusals, and read a byte each second."""
    with ExitStack() as held:
        connections = []
        for _ in range(NUM_OF_THREAD):
            connection = held.enter_context(attack.open(receive_bytes=SMALLEST_BUFFER))
            connections.append(connection)
        while not attack.is_over and connections:
            for connection in list(connections):
                try:
                    with suppress(BlockingIOError):
                        attack.num_bytes += connection.send(LARGEST_FILE + REFUSED[next(SEEDS) % 10])
                    with suppress(BlockingIOError):
                        connection.recv(1)
                except OSError:
                    attack.statuses["closed"] += 1
                    connections.remove(connection)
            time.sleep(READ_S)


def leaving_anywhere(attack: Attack, number: int) -> None:
    """End connections behind each byte of a request, and of its answer, by a reset or as usual."""
    request = REFUSED[next(SEEDS) * 7 % len(REFUSED)][:200]
    for sent in range(1, len(request) + 1, 3):
        with attack.open() as connection:
            with suppress(BlockingIOError):
                attack.num_bytes += connection.send(request[:sent])
            if sent % 2:
                select.select([connection], [], [], 0.002)
                with suppress(BlockingIOError):
                    connection.recv(sent)
            if number % 2:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        if attack.is_over:
            return


DOOR_KINDS: tuple[Callable[[Attack, int], None], ...] = (refusals, escapes, slow_readers, leaving_anywhere)
