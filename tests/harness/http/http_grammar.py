"""Random connections of hostile clients: requests with every framing, valid and invalid, one after another,
cut anywhere. A seed gives the same connection again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

EVIL = b"POST /now/0 HTTP/1.1\r\nHost: x\r\n\r\n"
"""Stands in bodies only, so no server may answer it."""
FIELDS = (
    b"Accept: */*\r\n",
    b"User-Agent: x\r\n",
    b"X-Request-Id: abc\r\n",
    b"Expect: 100-continue\r\n",
    b"Cookie: " + b"a=b; " * 40 + b"\r\n",
    b"X-Empty:\r\n",
    b"x-high: \xff\xfe\r\n",
    b"Connection: keep-alive\r\n",
    b"Connection: Upgrade\r\nUpgrade: h2c\r\n",
    b"Connection: upgrade\r\nUpgrade: websocket\r\n",
)
# A head or a body that must be refused; %d is the number of the request.
WRONG = (
    b"GET /now/%d HTTP/1.1\r\n\r\n",
    b"GET /now/%d HTTP/1.1\r\nHost: x\r\nHost: x\r\n\r\n",
    b"GET /now/%d HTTP/1.0\r\nHost: x\r\nHost: x\r\n\r\n",
    b"GET /now/%d HTTP/1.1\r\nHost: x\r\n" + b"a:\r\n" * 64 + b"\r\n",
    b"GET /now/%d HTTP/1.1\r\nHost: x\r\na: " + b"b" * (33 << 10) + b"\r\n\r\n",
    b"GET /now/%d HTTP/1.1\r\nHost: x\r\n" + b"a" * (50 << 10),
    b"GET /now/%d?" + b"q" * (50 << 10),
    b"\r\n" * 40_000 + b"GET /now/%d HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /now/%d HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 3000,
    b"GET /now/%d HTTP/1.1\r\nHost : x\r\n\r\n",
    b"GET /now/%d HTTP/1.1\r\nHost: x\nA: b\r\n\r\n",
    b"GET /now/%d HTTP/1.1\r\nHost: x\r\nA: b\r\n c\0\r\n\r\n",
    b"GET /now/%d HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"GET /now/%d HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nxxxxxx",
    b"GET /now/%d HTTP/1.1\r\nHost: x\r\nContent-Length: +5\r\n\r\nxxxxx",
    b"GET /now/%d HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n",
    b"GET /now/%d HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\n\r\n",
    b"GET /now/%d HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    b"GET /now/%d HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"GET /now/%d HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    b"GET ftp://x/now/%d HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET http://a@x/now/%d HTTP/1.1\r\nHost: x\r\n\r\n",
    b"CONNECT x:%d HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET now/%d\r\n\r\n",
    b"G\0T /now/%d HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00%d",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n%d",
)
CHUNKED = b"POST /%b/%d HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
WRONG_BODIES = (
    b"0\r\na: b\r\n\r\n",
    b"0\r\n" + b"a: b\r\n" * 5000,
    b"0\r\na: " + b"b" * 50_000,
    b"0\r\n" + b"a" * 50_000,
    b"2\r\nxx\r\n0\r\nContent-Length: 5\r\n\r\n",
    b"2;" + b"e" * 50_000,
    b"1\r\nx\r\n" * 7000,
    b"zz\r\n",
    b"-1\r\nx\r\n",
    b"fffffffffffffffff\r\n",
    b"2\r\nxxx\r\n",
    b"2\nxx\r\n0\r\n\r\n",
)
MANY_CHUNKS = b"8\r\nxxxxxxxx\r\n" * 12_000 + b"0\r\n\r\n"


@dataclass
class Stream:
    """Bytes that come on one connection, and how they must be answered."""

    pieces: list[tuple[bytes, int]] = field(default_factory=list)
    """Bytes as they are read, and how many turns of the server's event loop pass before each read."""
    bodies: list[bytes] = field(default_factory=list)
    """Bodies of the requests that are right, in order: number 1 and up."""
    is_last: bool = False
    """The latest of them is the last that may be answered: it asked for an end of the connection."""
    is_wrong: bool = False
    """Behind them comes one that is wrong: it must be refused, and nothing behind it be answered."""
    has_wrong_body: bool = False
    """Only its body is wrong, so it may have been answered before that came."""
    is_wild: bool = False
    """Bytes were changed at random: nobody knows what it says."""


def make_stream(seed: int) -> Stream:
    rng = random.Random(seed)
    stream = Stream()
    data: list[bytes] = []
    chance = rng.random()
    for _ in range(1 if chance < 0.65 else rng.randint(2, 5) if chance < 0.99 else rng.randint(10, 40)):
        data.append(_right(rng, stream))
        if stream.is_last:
            break
    chance = rng.random()
    if chance < 0.2 and not stream.is_last:
        data.append(_wrong(rng, stream))
    if (stream.is_wrong or stream.is_last) and rng.random() < 0.5:
        data.append(EVIL)
    whole = b"".join(data)
    if chance > 0.7:
        whole = _mutated(rng, whole)
        stream.is_wild = True
    stream.pieces = [(piece, rng.choice((0, 0, 1, 12))) for piece in _cut(rng, whole)]
    return stream


def _right(rng: random.Random, stream: Stream) -> bytes:
    path = rng.choice((b"now", b"read", b"read", b"late"))
    fields = b"".join(rng.sample(FIELDS, rng.choice((0, 0, 1, 3))))
    version = b"1.1"
    if rng.random() < 0.08:
        fields, version = b"", rng.choice((b"1.0", b"1.1"))
        fields = b"Connection: close\r\n" if version == b"1.1" else b""
        stream.is_last = True
    body = b""
    framing = b""
    coded = b""
    if rng.random() < 0.6:
        body = EVIL * rng.randint(0, 3) + b"x" * rng.choice((0, 1, 10, 100) * 5 + (70_000,))
        if version == b"1.1" and rng.random() < 0.002:
            body, framing, coded = b"x" * 96_000, b"Transfer-Encoding: chunked\r\n", MANY_CHUNKS
        elif version == b"1.1" and rng.random() < 0.5:
            framing, coded = b"Transfer-Encoding: chunked\r\n", _chunks(rng, body)
        else:
            framing, coded = b"Content-Length: %d\r\n" % len(body), body
    stream.bodies.append(body)
    head = b"POST /%b/%d HTTP/%b\r\nHost: x\r\n" % (path, len(stream.bodies), version)
    return head + fields + framing + b"\r\n" + coded


def _chunks(rng: random.Random, body: bytes) -> bytes:
    chunks = []
    at = 0
    extension = rng.choice((b"", b"", b";a=b", b';a="b;c"'))
    while at < len(body):
        chunk = body[at : at + rng.choice((1, 7, 20, 300, 1 << 16))]
        chunks.append(b"%x%b\r\n%b\r\n" % (len(chunk), extension, chunk))
        at += len(chunk)
        if len(chunks) == 40:
            chunks.append(b"%x\r\n%b\r\n" % (len(body) - at, body[at:]) if at < len(body) else b"")
            break
    return b"".join(chunks) + b"0\r\n\r\n"


def _wrong(rng: random.Random, stream: Stream) -> bytes:
    stream.is_wrong = True
    number = len(stream.bodies) + 1
    if rng.random() < 0.3:
        stream.has_wrong_body = True
        return CHUNKED % (rng.choice((b"now", b"read")), number) + rng.choice(WRONG_BODIES)
    return rng.choice(WRONG) % number


def _mutated(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    changes: tuple[Callable[[int], None], ...] = (
        lambda at: changed.__setitem__(at, rng.choice(b"\r\n \0:;09afxAZ\xff")),
        lambda at: changed.__delitem__(slice(at, at + rng.randint(1, 9))),
        lambda at: changed.__setitem__(slice(at, at), changed[at : at + rng.randint(1, 60)]),
        lambda at: changed.__setitem__(slice(at, at), rng.choice((b"\r\n", b"\r\n\r\n", b"0\r\n\r\n", EVIL))),
        lambda at: changed.__delitem__(slice(at, None)),
    )
    for _ in range(rng.choice((1, 1, 2, 5))):
        if changed:
            rng.choice(changes)(rng.randrange(min(len(changed), 2000)))
    return bytes(changed)


def _cut(rng: random.Random, data: bytes) -> list[bytes]:
    """Cut the bytes into reads of at most 256,000."""
    chance = rng.random()
    if chance < 0.05 and len(data) < 200:
        return [data[at : at + 1] for at in range(len(data))]
    num_cuts = 0 if chance < 0.5 else rng.randint(1, 8)
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(num_cuts))
    edges = [0, *cuts, len(data)]
    parts = [data[start:end] for start, end in pairwise(edges)]
    return [part[at : at + 256_000] for part in parts for at in range(0, len(part), 256_000)]
