"""Work that TLS makes for one turn of the event loop: handshakes, and records that come."""

from __future__ import annotations

import gc
import socket
import ssl
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from carousel.server.http import connection_turns
from carousel.server.http.connection_count import ConnectionCount
from carousel.server.http.protocol import HttpProtocol
from carousel.server.http.tls import handshake_turns
from carousel.server.http.tls.tls_reader import MAX_HELLO_BYTES, MAX_RECORDS, TlsReader
from tests.harness.http.http_front import Front, http_front
from tests.harness.http.noted_turns import NotedTurns
from tests.harness.http.raw_tls import RawTls, client_hello
from tests.harness.http.tls import FILES
from tests.harness.http.wide_hello import wide_hello
from tests.harness.ring.fake_ring import spell
from tests.harness.ring.launched import wait_until

LIVE = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"
NUM_CALLERS = 48
MOST_IN_TURN = 4
"""Handshakes that a turn may make whose time is over at once. The turns are counted by another chain."""
NUM_WAITING = 200
NUM_SENDERS = 4
RECORDS = (b"POST /live HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n", *[b"x"] * 2000)
MOST_READ = 4 * MAX_RECORDS
VERSIONS = [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3]


@pytest.fixture
def front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Front]:
    """Its turns are over after one thing each, so that no count depends on how fast this machine is."""
    monkeypatch.setattr(handshake_turns, "TURN_S", 0.0)
    monkeypatch.setattr(connection_turns, "TURN_COST", 1)
    with http_front(tmp_path, spell("a"), **FILES) as front:
        assert front.http.get("/live").status_code == 200
        yield front


def connect(front: Front, held: ExitStack, turns: NotedTurns) -> list[socket.socket]:
    """Return connections that the server has accepted and knows as those of TLS."""
    before = len(turns.calls)
    connections = [held.enter_context(front.connect()) for _ in range(NUM_CALLERS)]
    wait_until(lambda: len(turns.calls) == before + NUM_CALLERS, 5.0, "they are accepted")
    return connections


def most_in_turn(turns: NotedTurns, before: int, num_calls: int) -> int:
    wait_until(lambda: len(turns.calls) >= before + num_calls, 5.0, "all have had their turn")
    turns.is_over = True
    return max(Counter(turns.calls[before:]).values())


def test_handshakes_that_begin_together_are_made_a_few_in_a_turn(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All were made in one: callers who were refused together came again together."""
    turns = NotedTurns(monkeypatch, ssl.SSLObject, "do_handshake")
    with ExitStack() as held:
        connections = connect(front, held, turns)
        before = len(turns.calls)
        with turns.held():
            for connection in connections:
                connection.sendall(client_hello())
        for connection in connections:
            assert connection.recv(1)
        assert most_in_turn(turns, before, NUM_CALLERS) <= MOST_IN_TURN


@pytest.mark.parametrize("version", VERSIONS)
def test_handshakes_that_go_on_together_go_on_a_few_in_a_turn(
    front: Front, monkeypatch: pytest.MonkeyPatch, version: ssl.TLSVersion
) -> None:
    """In TLS 1.2 the second message is the one that costs the most with some keys."""
    turns = NotedTurns(monkeypatch, ssl.SSLObject, "do_handshake")
    with ExitStack() as held:
        connections = connect(front, held, turns)
        callers = [RawTls(version) for _ in connections]
        for caller, connection in zip(callers, connections, strict=True):
            connection.sendall(caller.flight())
        second = [
            caller.flight(connection.recv(1 << 16))
            for caller, connection in zip(callers, connections, strict=True)
        ]
        before = len(turns.calls)
        assert before >= 2 * NUM_CALLERS
        with turns.held():
            for flight, connection in zip(second, connections, strict=True):
                connection.sendall(flight)
        assert most_in_turn(turns, before, NUM_CALLERS) <= MOST_IN_TURN


def test_no_handshake_is_made_for_who_has_left(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = NotedTurns(monkeypatch, ssl.SSLObject, "do_handshake")
    with ExitStack() as held:
        connections = connect(front, held, turns)
        before = len(turns.calls)
        with turns.held():
            for connection in connections:
                connection.sendall(client_hello())
                connection.close()
        assert front.http.get("/live").status_code == 200
        time.sleep(0.1)
        assert len(turns.calls) == before


def most_read_in_turn(front: Front, turns: NotedTurns, request: bytes, status: bytes) -> int:
    """Return how many of the short records that some callers send together a turn decrypts, after an answer
    to this request.
    """
    with ExitStack() as held:
        connections = [held.enter_context(front.connect()) for _ in range(NUM_SENDERS)]
        callers = [RawTls() for _ in connections]
        for caller, connection in zip(callers, connections, strict=True):
            caller.shake_hands(connection)
            connection.sendall(caller.records(request))
            assert caller.receive(connection).startswith(b"HTTP/1.1 " + status)
        before = len(turns.calls)
        with turns.held():
            for caller, connection in zip(callers, connections, strict=True):
                connection.sendall(caller.records(*RECORDS))
        return most_in_turn(turns, before, len(RECORDS) * NUM_SENDERS)


def test_short_records_are_decrypted_a_few_in_a_turn(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 256 KiB were, of each connection: 11,000 of a byte each, in 17 ms."""
    turns = NotedTurns(monkeypatch, ssl.SSLObject, "read")
    assert most_read_in_turn(front, turns, LIVE, b"200") <= MOST_READ


def test_what_comes_after_the_end_is_decrypted_a_little_in_a_turn(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    """35 MB were, of sixteen callers whose bodies had been refused: 38 ms."""
    turns = NotedTurns(monkeypatch, ssl.SSLObject, "read")
    assert most_read_in_turn(front, turns, b"GET /live HTTP/1.1\r\n\r\n", b"400") <= MOST_READ


def test_records_of_a_connection_that_was_not_read_are_decrypted_a_few_in_a_turn(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop's TLS takes them meanwhile, and decrypts all at once."""
    held_up: list[HttpProtocol] = []
    data_received = HttpProtocol.data_received

    def receive(self: HttpProtocol, data: bytes | memoryview) -> None:
        if not held_up:
            held_up.append(self)
            self.flow.is_held = True
        data_received(self, data)

    monkeypatch.setattr(HttpProtocol, "data_received", receive)
    turns = NotedTurns(monkeypatch, ssl.SSLObject, "read")
    caller = RawTls()
    with front.connect() as connection:
        caller.shake_hands(connection)
        connection.sendall(caller.records(*RECORDS))
        wait_until(lambda: bool(held_up), 5.0, "the first record has come")
        time.sleep(0.1)
        before = len(turns.calls)
        assert before <= MOST_READ
        with turns.held():
            turns.call(lambda: setattr(held_up[0].flow, "is_held", False))
        assert most_in_turn(turns, before, len(RECORDS) - before) <= MOST_READ


def test_short_records_that_come_with_the_end_of_a_handshake_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those behind the first ones were lost, and the request never came to its end."""
    monkeypatch.setattr(handshake_turns, "TURN_S", 10.0)
    with http_front(tmp_path, spell("a"), **FILES) as front, front.connect() as connection:
        caller = RawTls()
        connection.sendall(caller.flight())
        last = caller.flight(connection.recv(1 << 16))
        assert caller.is_secure
        records = caller.records(*[bytes([byte]) for byte in LIVE], *[LIVE])
        connection.sendall(last + records)
        connection.settimeout(5.0)
        received = b""
        while received.count(b"HTTP/1.1 200") < 2:
            received += caller.receive(connection)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_client_that_leaves_in_its_handshake_is_no_connection(
    front: Front, monkeypatch: pytest.MonkeyPatch, version: ssl.TLSVersion
) -> None:
    front.http.close()
    counts: set[ConnectionCount] = set()
    add = ConnectionCount.add

    def note(count: ConnectionCount, address: str) -> bool:
        counts.add(count)
        return add(count, address)

    monkeypatch.setattr(ConnectionCount, "add", note)
    hello = RawTls(version).flight()
    for begun in (b"", hello[:1], hello[:-1], hello, LIVE):
        with front.connect() as connection:
            connection.sendall(begun)
            if begun in (hello, LIVE):
                connection.recv(1)
    (count,) = counts
    wait_until(lambda: not count.total, 5.0, "all are gone")
    with front.connect() as connection:
        caller = RawTls(version)
        caller.shake_hands(connection)
        connection.sendall(caller.records(LIVE))
        assert caller.receive(connection).startswith(b"HTTP/1.1 200")


def test_a_first_message_has_only_so_many_bytes(front: Front, caplog: pytest.LogCaptureFixture) -> None:
    """One of 64 KiB took 65 ms to read, in one turn of the loop."""
    with front.connect() as connection:
        connection.sendall(wide_hello(MAX_HELLO_BYTES - 300))
        assert connection.recv(1) == b"\x16", "it is answered by a message of the handshake"
    with front.connect() as connection:
        with suppress(ConnectionError):
            connection.sendall(wide_hello())
        wait_until(lambda: is_closed(connection), 5.0, "it is closed without an answer")
    assert "8 KiB" in caplog.text


def test_renegotiation_is_off(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is with most builds of OpenSSL, but not with all that Python takes."""
    seen: list[ssl.Options] = []
    wrap_bio = ssl.SSLContext.wrap_bio

    def note(context: ssl.SSLContext, *given: Any, **named: Any) -> ssl.SSLObject:
        seen.append(context.options)
        return wrap_bio(context, *given, **named)

    monkeypatch.setattr(ssl.SSLContext, "wrap_bio", note)
    with front.open_client() as http:
        assert http.get("/live").status_code == 200
    assert ssl.OP_NO_RENEGOTIATION in seen[0]


def test_many_connections_wait_to_be_accepted(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than 128 did. Others were not noticed, and came a second later, when TCP tries again."""
    turns = NotedTurns(monkeypatch, ssl.SSLObject, "do_handshake")
    with front.open_client() as http:
        assert http.get("/live").status_code == 200
    with ExitStack() as held:
        with turns.held():
            for _ in range(NUM_WAITING):
                connection = held.enter_context(socket.socket())
                connection.settimeout(0.9)
                connection.connect(("127.0.0.1", front.port))
        turns.is_over = True


def test_connections_of_an_address_count_from_their_first_moment(tmp_path: Path) -> None:
    """They counted after the handshake, so that one address could have all."""
    with (
        http_front(tmp_path, spell("a"), max_connections_per_address=2, **FILES) as front,
        ExitStack() as held,
    ):
        assert front.http.get("/live").status_code == 200
        waiting = held.enter_context(front.connect())
        with front.open_client() as http:
            refused = http.get("/live")
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "too_many_connections"
        waiting.close()
        with front.open_client() as http:
            wait_until(lambda: http.get("/live").status_code == 200, 5.0, "its place is free")


def test_an_address_that_begins_no_handshake_has_few_connections(tmp_path: Path) -> None:
    """It could have all for ten seconds: a refusal is sent after the handshake."""
    with (
        http_front(tmp_path, spell("a"), max_connections_per_address=2, **FILES) as front,
        ExitStack() as held,
    ):
        connections = [held.enter_context(front.connect()) for _ in range(12)]
        for connection in connections:
            connection.setblocking(False)
        wait_until(lambda: sum(map(is_closed, connections)) == 8, 5.0, "all but twice as many are closed")


def is_closed(connection: socket.socket) -> bool:
    """Return True if the server has closed a connection, on which it has sent nothing."""
    try:
        return not connection.recv(1)
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_what_reads_below_tls_is_let_go_with_its_connection(front: Front) -> None:
    """In a cycle with the connection above it would wait for a full collection."""

    def num_readers() -> int:
        return sum(type(each) is TlsReader for each in gc.get_objects())

    front.http.close()
    gc.collect()  # of those that tests before this one have left
    before = num_readers()
    gc.disable()
    try:
        for _ in range(8):
            with front.connect() as connection:
                connection.sendall(client_hello())
                assert connection.recv(1)
            with front.connect() as connection:
                connection.sendall(LIVE)
                assert not connection.recv(1)
            with front.open_client() as http:
                assert http.get("/live").status_code == 200
        wait_until(lambda: num_readers() <= before, 5.0, "they are let go")
    finally:
        gc.enable()
