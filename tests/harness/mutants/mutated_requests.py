"""HTTP requests of a broken or hostile client, mutated anywhere from the head's first byte to the body's
last.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from tests.harness.http.mutated_bodies import mutated_bodies

TARGETS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/responses",
    "/generate",
    "/tokenize",
    "/v1/models",
    "/metrics",
    "/live",
    "/server_info",
    "/openapi.json",
    "/",
    "*",
    "//",
    "/v1/../v1/models",
    "/%00",
    "/%zz",
    "/" + "a" * 5000,
    "http://other/v1/models",
)
METHODS = ("GET", "POST", "PUT", "HEAD", "OPTIONS", "CONNECT", "PRI", "get", "", "A" * 40)
HEADERS = (
    "Content-Length: 0",
    "Content-Length: 5",
    "Content-Length: -1",
    "Content-Length: 99999999999999999999",
    "Content-Length: 1, 2",
    "Transfer-Encoding: chunked",
    "Transfer-Encoding: gzip, chunked",
    "Content-Type: application/json",
    "Content-Type: text/plain",
    "Content-Encoding: gzip",
    "Expect: 100-continue",
    "Upgrade: websocket",
    "Connection: upgrade, close",
    "Authorization: Bearer x",
    "x-api-key: x",
    "Host:",
    " folded: x",
    "no colon",
    "x" * 300 + ": y",
    "X-Request-Id: \x00",
    "X-Request-Id: " + "r" * 5000,
    "X: " + "y" * 40_000,
    *("A: b",) * 3,
)


def mutated_requests(count: int, rng: random.Random) -> Iterator[tuple[bytes, bool]]:
    """(request, whether it has a good head): half of them are wrong before the body begins."""
    for path, body in mutated_bodies(count, rng):
        if rng.random() < 0.5:
            yield _head(path, len(body)) + body, True
        else:
            yield _damaged(_strange_head(rng) + body, rng), False


def _head(path: str, num_bytes: int) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        f"Content-Length: {num_bytes}\r\n\r\n"
    ).encode()


def _strange_head(rng: random.Random) -> bytes:
    version = rng.choice(("HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "HTTP/9", ""))
    lines = [f"{rng.choice(METHODS)} {rng.choice(TARGETS)} {version}"]
    lines += rng.choices(HEADERS, k=rng.choice((0, 1, 3, 8, 80)))
    end = rng.choice(("\r\n", "\r\n", "\r\n", "\n", "\r", "\0"))
    return (end.join([*lines, "", ""])).encode("latin-1")


def _damaged(data: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(data)
    for _ in range(rng.choice((0, 0, 1, 3))):
        at = rng.randrange(len(damaged) + 1)
        kind = rng.randrange(3)
        if kind == 0 and at < len(damaged):
            damaged[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del damaged[at:]
        else:
            damaged[at:at] = rng.randbytes(rng.randrange(1, 16))
    return bytes(damaged)
