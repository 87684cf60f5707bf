"""NumberedApp: answers each request of an artificial connection with its number. Checks of the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from carousel.server.http.protocol import MAX_PIPELINED
from tests.harness.http.http_grammar import Stream

Address: TypeAlias = tuple[str, int]


@dataclass
class Visit:
    """Connection as the application has seen it."""

    is_wild: bool
    """Nobody knows what it says."""
    served: dict[int, bytes] = field(default_factory=dict)
    """By the number of a request, what came of its body."""


class NumberedApp:
    """An ASGI application for the streams of `http_grammar`."""

    def __init__(self) -> None:
        self.visits: dict[Address, Visit] = {}
        """By the address of a client that is here."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        how, _, number = scope["path"].strip("/").partition("/")
        client: Address = scope["client"]
        if how == "late":
            for _ in range(3):
                await asyncio.sleep(0)
        body = b""
        while how == "read":
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            if not message["more_body"]:
                break
        if number.isdecimal() and (visit := self.visits.get(client)) is not None:
            assert int(number) not in visit.served or visit.is_wild
            visit.served[int(number)] = body
        text = number.encode()[:20]
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-length", b"%d" % len(text))],
            }
        )
        await send({"type": "http.response.body", "body": text})


def check_answers(
    stream: Stream,
    written: bytes,
    served: Mapping[int, bytes],
    *,
    is_closed: bool,
    is_reset: bool = False,
) -> None:
    """Check all that must be true of what a server has written, and then closed. is_reset: the end of it was
    lost, since the server closed before it had read all there was. Raises AssertionError.
    """
    numbers, statuses = _answers(written, may_be_cut=is_reset)
    errors = [status for status in statuses if status != 200]
    assert len(errors) <= 1, "refused twice"
    assert not errors or (statuses[-1] != 200 and is_closed), "something follows a refusal"
    if stream.is_wild:
        return
    assert numbers == list(range(1, len(numbers) + 1)), "an answer is missing, or there are two"
    most = len(stream.bodies) + stream.has_wrong_body
    assert len(numbers) <= most, "what is no request was answered"
    assert len(numbers) + len(errors) <= len(stream.bodies) + 1, "a request was answered twice"
    for number, body in served.items():
        assert number, "a body was taken for a request"
        assert number <= most, "what was refused was begun before"
        assert body in (b"", *stream.bodies[number - 1 : number])
    if len(stream.bodies) <= MAX_PIPELINED and not stream.is_wrong:
        assert len(numbers) == len(stream.bodies) or is_reset, "a request was not answered"
        assert is_closed == stream.is_last
    if stream.is_wrong:
        assert is_closed


def is_cut(written: bytes | bytearray) -> bool:
    """Return True if the last answer has come in part."""
    if not written:
        return False
    head, blank, rest = written[max(0, written.rfind(b"HTTP/1.1 ")) :].partition(b"\r\n\r\n")
    length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
    return not blank if not length else len(rest) < int(length)


def _answers(written: bytes, *, may_be_cut: bool) -> tuple[list[int], list[int]]:
    """The numbers of the requests that were answered, and the statuses of all answers."""
    numbers, statuses = [], []
    while written:
        head, blank, rest = written.partition(b"\r\n\r\n")
        if may_be_cut and not blank:
            break
        status = int(head.split(b" ", 2)[1])
        if status == 100:
            written = rest
            continue
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        if may_be_cut and len(rest) < length:
            break
        assert len(rest) >= length
        statuses.append(status)
        if status == 200 and rest[:length].isdigit():
            numbers.append(int(rest[:length]))
        written = rest[length:]
    return numbers, statuses
