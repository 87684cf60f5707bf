"""Tests of how many connections the HTTP server takes, and of whom."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from carousel.server.http.body_pace import BodyPace
from carousel.server.http.connection_count import ConnectionCount
from carousel.server.http.paced_reader import PacedReader
from carousel.server.http.protocol import HttpProtocol
from carousel.server.http.rare_warnings import LOGGERS
from carousel.server.http.server import DATE_S, HttpServer
from carousel.server.main import main, without_query
from carousel.server.tenancy.unread_answers import UnreadAnswers
from tests.harness.http.http_front import Front, http_front, raw_request
from tests.harness.http.noted_turns import NotedTurns
from tests.harness.ring.fake_ring import WAIT_S, spell
from tests.harness.ring.launched import wait_until

LIVE = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"
FILE = b"GET /page/vendor/uplot.js HTTP/1.1\r\nHost: x\r\n\r\n"
MANY_FIELDS = b"GET /many HTTP/1.1\r\nHost: x\r\n" + 60 * b"a:b\r\n" + b"\r\n"
MOST = 4
CROWD = 120
BURST = 100


def answers(connection: socket.socket, timeout_s: float | None = None) -> bool:
    """Return True if the server answers a request on this connection with 200 in that time."""
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


def is_welcome(front: Front) -> bool:
    """Return True if the server answers a request on a new connection with 200."""
    with front.connect() as connection, suppress(ConnectionError):
        connection.sendall(LIVE)
        return connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
    return False


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
        wait_until(lambda: is_welcome(front), 10.0, "a place for one more")
        assert front.complete().status_code == 200


@pytest.mark.parametrize("proxies", ["", "10.0.0.1", "10.0.0.1, 127.0.0.0/8", "::1, *"])
def test_only_a_proxy_that_was_named_says_where_a_request_comes_from(
    tmp_path: Path, proxies: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with http_front(tmp_path, spell("a"), log_level="info", forwarded_allow_ips=proxies) as front:
        assert front.http.get("/version", headers={"x-forwarded-for": "10.9.8.7"}).status_code == 200
    (line,) = [record.getMessage() for record in caplog.records if record.name == "uvicorn.access"]
    assert line.startswith("10.9.8.7:" if proxies.endswith(("8", "*")) else "127.0.0.1:")


@pytest.mark.parametrize(("level", "own", "count"), [("info", "warning", 0), ("warning", "info", 1)])
def test_lines_of_requests_have_a_level_of_their_own(
    tmp_path: Path, level: str, own: str, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    with http_front(tmp_path, spell("a"), log_level=level, log_level_http=own) as front:
        assert front.http.get("/version").status_code == 200
    assert [record.name for record in caplog.records].count("uvicorn.access") == count


def test_a_line_of_a_request_has_neither_its_query_nor_the_end_of_a_long_path(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Lines of 96 KiB, which anybody could have written by the thousand, fill a disk."""
    caplog.set_level("INFO")
    log = logging.getLogger("uvicorn.access")
    log.addFilter(without_query)
    try:
        with http_front(tmp_path, spell("a"), log_level="info") as front:
            front.http.get("/version?secret")
            front.exchange(b"GET /" + b"|" * 30_000 + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    finally:
        log.removeFilter(without_query)
    short, long = (record.getMessage() for record in caplog.records if record.name == "uvicorn.access")
    assert '"GET /version HTTP/1.1" 200' in short
    assert len(long) < 350
    assert long.endswith('%7C%7C%7C... HTTP/1.1" 404')


def test_warnings_that_strangers_cause_are_a_line_a_minute_of_each_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loggers = [logging.getLogger(name) for name in (*LOGGERS, "uvicorn.access")]
    filters = [list(logger.filters) for logger in loggers]
    with monkeypatch.context() as patch:
        patch.setattr("carousel.server.main.serve", lambda _, **__: None)
        patch.setattr("carousel.server.main.collect_new_objects_alone", lambda: None)
        patch.setattr("carousel.server.main.uvloop.run", lambda _: None)
        context: Any = None
        main(context)
    try:
        with http_front(tmp_path, spell("a"), log_level="info") as front:

            def warn(count: int) -> list[str]:
                caplog.clear()
                for _ in range(count):
                    assert front.exchange(b"nonsense\r\n\r\n").status_code == 400
                return [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]

            (line,) = warn(5)
            assert warn(3) == []
            monkeypatch.setattr("carousel.server.http.rare_warnings.PERIOD_S", 0.0)
            assert warn(1) == [f"{line} (7 more of these were left out)"]
    finally:
        for logger, before in zip(loggers, filters, strict=True):
            logger.filters[:] = before


def test_connections_are_no_more_than_there_are_descriptors_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (256 + MOST, 1 << 20))
    with http_front(tmp_path, spell("a")) as front, ExitStack() as held:
        front.http.close()
        assert all(answers(ask(front, held)) for _ in range(MOST))
        assert not answers(ask(front, held), 0.1)
    assert f"max_connections: {MOST} instead of 8192" in caplog.text


def test_connections_that_wait_are_accepted_several_in_a_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was one in a turn. Behind 150, and each turn read of all, /live was answered after 187 ms."""
    turns = NotedTurns(monkeypatch, PacedReader, "connection_made")
    with http_front(tmp_path, spell("a")) as front, ExitStack() as held:
        assert answers(ask(front, held))
        before = len(turns.calls)
        with turns.held():
            connections = [held.enter_context(front.connect()) for _ in range(64)]
            for connection in connections:
                connection.sendall(LIVE)
        assert all(answers(each) for each in connections)
        turns.is_over = True
    made_in = turns.calls[before:]
    assert len(made_in) == 64
    assert len(set(made_in)) <= 24, made_in


def test_a_probe_is_answered_before_the_requests_of_a_crowd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was the last one. Behind 640, each of which asked for a large file, it waited for 0.24 s of CPU."""
    turns = NotedTurns(monkeypatch, HttpProtocol, "_begin_request")
    begin, begun = HttpProtocol._begin_request, list[str]()

    def begin_request(self: HttpProtocol, cycle: RequestResponseCycle, app: Any) -> None:
        begun.append(cycle.scope["path"])
        begin(self, cycle, app)

    monkeypatch.setattr(HttpProtocol, "_begin_request", begin_request)
    with http_front(tmp_path, spell("a")) as front, ExitStack() as held:
        assert answers(ask(front, held))
        with turns.held():
            for _ in range(CROWD):
                held.enter_context(front.connect()).sendall(FILE)
            probe = ask(front, held)
        assert answers(probe)
        turns.is_over = True
    # This thread may see the answer only after the server has begun all.
    num_before = begun.index("/live", 1) - 1
    assert num_before < CROWD * 3 // 4, f"{num_before} requests began before the probe's"


def test_a_probe_is_read_before_what_a_crowd_sends_behind_its_first_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe was read last: behind 415 connections with long heads it waited for half a second."""
    read, complete = list[bytes](), HttpProtocol.on_headers_complete

    def note(self: HttpProtocol) -> None:
        read.append(self.url)
        complete(self)

    monkeypatch.setattr(HttpProtocol, "on_headers_complete", note)
    turns = NotedTurns(monkeypatch, HttpProtocol, "_begin_request")
    with http_front(tmp_path, spell("a")) as front, ExitStack() as held:
        crowd = [ask(front, held) for _ in range(CROWD)]
        assert all(answers(each) for each in crowd)
        num_first = len(read)
        with turns.held():
            for connection in crowd:
                connection.sendall(MANY_FIELDS)
            probe = ask(front, held)
        assert answers(probe)
        turns.is_over = True
    num_before = read.index(b"/live", num_first) - num_first
    assert num_before < CROWD * 3 // 4, f"{num_before} heads were read before the probe's"


def test_paths_that_are_all_escapes_are_read_a_few_in_a_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten of them, of 32 KiB, made a turn of 62 ms."""
    head = b"GET /" + b"%61" * 10_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n"
    turns = NotedTurns(monkeypatch, HttpProtocol, "on_headers_complete")
    with http_front(tmp_path, spell("a")) as front, ExitStack() as held:
        connections = [ask(front, held) for _ in range(16)]
        assert all(answers(each) for each in connections)
        before = len(turns.calls)
        with turns.held():
            for connection in connections:
                connection.sendall(head)
        for connection in connections:
            data = b""
            while b"HTTP/1.1 404" not in data:  # what is left of the first answer may come before it
                part = connection.recv(1 << 16)
                assert part, data
                data += part
        turns.is_over = True
    read_in = Counter(turns.calls[before:])
    assert read_in.total() == 16
    assert max(read_in.values()) <= 2, read_in


def test_bodies_that_have_waited_for_the_same_are_refused_a_few_in_a_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """128 of them, and the loop was late, made a turn of 22 ms."""
    monkeypatch.setattr("carousel.server.request.body.BODY_TIMEOUT_S", 0.3)
    turns = NotedTurns(monkeypatch, HttpProtocol, "on_response_complete")
    half_body = raw_request("/v1/completions", prompt="x")[:-5]
    with http_front(tmp_path, spell("a")) as front, ExitStack() as held:
        assert answers(ask(front, held))
        # The answer may be here before the server has noted that it is complete.
        wait_until(lambda: len(turns.calls) == 1, 5.0, "the answer is complete")
        before = len(turns.calls)
        connections = [held.enter_context(front.connect()) for _ in range(64)]
        for connection in connections:
            connection.sendall(half_body)
        time.sleep(0.1)
        with turns.held():
            time.sleep(0.4)  # longer than bodies may take
        for connection in connections:
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 408")
        turns.is_over = True
    refused_in = Counter(turns.calls[before:])
    assert refused_in.total() == 64
    assert max(refused_in.values()) <= 16, refused_in


class CountingServer(HttpServer):
    def __init__(self) -> None:
        super().__init__(
            None, max_connections=1, max_per_address=0, body_pace=BodyPace(lambda: 0), unread=UnreadAnswers()
        )
        self.num_ticks = 0

    async def on_tick(self, counter: int) -> bool:
        self.num_ticks += 1
        return await super().on_tick(counter)


def test_an_idle_server_wakes_once_a_second_and_ends_when_it_is_told() -> None:
    async def main() -> None:
        server = CountingServer()
        running = asyncio.create_task(server.main_loop())
        await asyncio.sleep(DATE_S / 2)
        assert server.num_ticks == 1
        assert dict(server.server_state.default_headers)[b"date"]
        server.stop()
        await asyncio.wait_for(running, WAIT_S)
        assert server.num_ticks == 2

    asyncio.run(main())
