"""Attacks by TLS alone, on a server of HTTPS."""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from tests.faults.attacks.attack import BODY_BYTES, HALF_BODY, HELD_S, LIVE, OTHER_ADDRESS, TRUST, Attack
from tests.harness.http.key_updates import KeyUpdates
from tests.harness.http.raw_tls import client_hello
from tests.harness.http.wide_hello import wide_hello


def hellos(attack: Attack, number: int) -> None:
    """Begin TLS handshakes, one after another or a few bytes at a time, and never end them."""
    hello = client_hello()

    def drip() -> Iterator[bytes]:
        for at in range(len(hello)):
            time.sleep(0.001)
            yield hello[at : at + 1]

    attack.send(drip() if number % 2 else iter([hello]), stays_s=0.1 * (number % 4 == 0), has_tls=False)


def answered_hellos(attack: Attack, _: int) -> None:
    """Have the server make and sign a key, by the same bytes each time, and leave when it has answered. They
    come from another address than callers do.
    """
    with attack.open(has_tls=False, address=OTHER_ADDRESS) as connection:
        connection.sendall(client_hello())
        attack.num_bytes += len(client_hello())
        select.select([connection], [], [], HELD_S)


def short_records(attack: Attack, _: int) -> None:
    """A body with a TLS record for each of its bytes."""
    with attack.open() as connection:
        connection.settimeout(HELD_S)
        connection.sendall(HALF_BODY[:-BODY_BYTES])
        while not attack.is_over:
            connection.sendall(b" ")
            attack.num_bytes += 1


def key_updates(attack: Attack, _: int) -> None:
    """Records that change the keys, and ask the server to change its own."""
    attack.num_opened += 1
    with socket.create_connection(("127.0.0.1", attack.port), timeout=HELD_S) as connection:
        connection.setblocking(True)
        with KeyUpdates(connection) as updates:
            while not attack.is_over:
                attack.num_bytes += updates.send()


def wide_hellos(attack: Attack, _: int) -> None:
    """Begin handshakes with as many groups and keys as a message may have, from another address."""
    with attack.open(has_tls=False, address=OTHER_ADDRESS) as connection:
        connection.settimeout(HELD_S)
        hello = wide_hello()
        attack.num_bytes += len(hello)
        with suppress(ConnectionError):
            connection.sendall(hello)
            connection.recv(1)


def split_hellos(attack: Attack, _: int) -> None:
    """Begin handshakes with a record for each byte."""
    hello = client_hello()[5:]
    attack.send(iter([b"".join(b"\x16\x03\x01\0\1%c" % byte for byte in hello)]), stays_s=0.1, has_tls=False)


def sessions(attack: Attack, _: int) -> None:
    """Have the server keep a session of TLS 1.2 for each handshake, since there are no tickets."""
    context = ssl.create_default_context(cafile=TRUST)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_TICKET
    while not attack.is_over:
        with attack.open(has_tls=False) as connection:
            connection.settimeout(HELD_S)
            with context.wrap_socket(connection, server_hostname="localhost"):
                pass


def plain_requests(attack: Attack, number: int) -> None:
    """Speak HTTP where TLS is expected, or end TLS in the middle of a request."""
    if number % 2:
        attack.send(iter([LIVE * 1000]), stays_s=0.1, has_tls=False)
        return
    with attack.open() as connection:
        connection.settimeout(HELD_S)
        connection.sendall(LIVE[:10])
        with suppress(OSError):
            connection.unwrap()  # type: ignore[attr-defined]


TLS_KINDS: dict[str, Callable[[Attack, int], None]] = {
    "hellos": hellos,
    "many_hellos": hellos,
    "answered_hellos": answered_hellos,
    "many_answered_hellos": answered_hellos,
    "short_records": short_records,
    "key_updates": key_updates,
    "wide_hellos": wide_hellos,
    "split_hellos": split_hellos,
    "sessions": sessions,
    "plain_requests": plain_requests,
}
"""By name: what one connection does. Names that begin with `many_` are for many connections."""
