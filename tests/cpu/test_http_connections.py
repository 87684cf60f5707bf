"""How many connections the HTTP server takes, and of whom."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from api_server.connection_count import ConnectionCount
from tests.fake_ring import spell
from tests.http_front import Front, http_front

LIVE = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"
MOST = 4
BURST = 100


def answers(connection: socket.socket, timeout_s: float | None = None) -> bool:
    """Whether the server answers a request on this connection with 200 in that time."""
    connection.settimeout(timeout_s or connection.gettimeout())
    try:
        data = connection.recv(1 << 16)
    except TimeoutError:
        return False
    assert data.startswith(b"HTTP/1.1 200"), data
    return True


def ask(front: Front, held: ExitStack) -> socket.socket:
    connection = held.enter_context(front.connect())
    connection.sendall(LIVE)
    return connection


def test_connections_beyond_the_most_wait_until_one_ends(tmp_path: Path) -> None:
    with http_front(tmp_path, spell("a"), max_connections=MOST) as front, ExitStack() as held:
        front.http.close()
        connections = [ask(front, held) for _ in range(MOST)]
        assert all(answers(each) for each in connections)
        waiting = [ask(front, held) for _ in range(2)]
        assert not any(answers(each, 0.1) for each in waiting)
        for ended, begun in zip(connections, waiting, strict=False):
            ended.close()
            begun.settimeout(10.0)
            assert answers(begun)


def test_a_burst_of_connections_is_served_to_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    totals: list[int] = []
    add = ConnectionCount.add

    def add_and_look(self: ConnectionCount, address: str) -> bool:
        is_welcome = add(self, address)
        totals.append(self.total)
        return is_welcome

    monkeypatch.setattr(ConnectionCount, "add", add_and_look)
    with http_front(tmp_path, spell("a"), max_connections=MOST) as front, ExitStack() as held:
        front.http.close()
        for connection in [ask(front, held) for _ in range(BURST)]:
            assert answers(connection)
            connection.close()
    assert max(totals) == MOST


def test_one_address_has_only_so_many_connections(tmp_path: Path) -> None:
    with http_front(tmp_path, spell("a"), max_connections_per_address=MOST) as front, ExitStack() as held:
        assert front.http.get("/live").status_code == 200
        connections = [ask(front, held) for _ in range(MOST - 1)]
        assert all(answers(each) for each in connections)
        refused = front.exchange(b"")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "too_many_connections"
        another = held.enter_context(
            socket.create_connection(("127.0.0.1", front.port), 10.0, ("127.0.0.2", 0))
        )
        another.sendall(LIVE)
        assert answers(another)
        connections[0].close()
        assert front.complete().status_code == 200


def test_connections_are_no_more_than_there_are_descriptors_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (256 + MOST, 1 << 20))
    with http_front(tmp_path, spell("a")) as front, ExitStack() as held:
        front.http.close()
        assert all(answers(ask(front, held)) for _ in range(MOST))
        assert not answers(ask(front, held), 0.1)
    assert f"max_connections: {MOST} instead of 8192" in caplog.text
