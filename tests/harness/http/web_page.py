"""Web page that posts requests to the ZMQ ports of the machine that shows it."""

from __future__ import annotations


def post_of_frames(frame: bytes, count: int = 64) -> bytes:
    """Return an HTTP request with `count` messages of one frame in its body, as ZMTP 1.0 frames them.

    Any page may send it to any port. A ZMQ socket without a mechanism takes the first byte of "POST" for a
    length and the 80 bytes behind it for the sender's identity; so long is the head.
    """
    body = b"".join(bytes((len(frame) + 1, 0)) + frame for _ in range(count))
    head = f"POST / HTTP/1.1\r\nContent-Length: {len(body)}\r\nHost: "
    return head.ljust(1 + ord("P") - 4, "x").encode() + b"\r\n\r\n" + body
