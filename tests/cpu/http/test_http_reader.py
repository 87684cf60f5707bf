"""Reads of the HTTP server, seen by raw sockets: framing, pipelines, requests that have no end."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from carousel.server.http.body_pool import BodyPool
from carousel.server.server_state import ServerState
from runtime.wire.messages import GenerateRequest, SequenceOutput
from tests.harness.http.http_front import Front, http_front
from tests.harness.ring.fake_ring import finish, output, spell
from tests.harness.ring.launched import wait_until

LIVE = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"
JSON = b"Host: x\r\nContent-Type: application/json\r\n"
CHUNKED = b"POST %b HTTP/1.1\r\n" + JSON + b"Transfer-Encoding: chunked\r\n\r\n"
MIB = 1 << 20
SOME = b"z" * (64 << 10)
MANY = 24 << 20
"""Bytes beyond what the sockets' buffers take."""


def answer(request: GenerateRequest) -> list[SequenceOutput]:
    return [] if (request.text or "").startswith("silence") else spell("abc")(request)


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with http_front(tmp_path_factory.mktemp("run"), answer, log_level="info") as front:
        yield front


def send_all(connection: socket.socket, data: bytes, most: int) -> int:
    """Send the same again and again. Return after how many bytes the server has closed the connection, or
    `most`.
    """
    sent = 0
    with suppress(ConnectionError):
        while sent < most:
            connection.sendall(data)
            sent += len(data)
    return sent


def drip(connection: socket.socket, count: int) -> bool:
    """Send so many bytes, one by one. False if the server has closed the connection before."""
    with suppress(ConnectionError):
        for _ in range(count):
            connection.sendall(b"x")
            time.sleep(0.005)
        return True
    return False


def wait_request(front: Front, text: str) -> GenerateRequest:
    return front.ring.wait_for(lambda: [each for each in front.ring.requests if each.text == text])[0]


def read_all(connection: socket.socket) -> bytes:
    data = b""
    with suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            data += part
    return data


def read_answer(connection: socket.socket) -> bytes:
    data = b""
    while b"}" not in data:
        part = connection.recv(1 << 16)
        assert part, data
        data += part
    return data


def error_of(data: bytes) -> tuple[int, str]:
    """Status and code of an answer that is an error."""
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), httpx.Response(400, content=body).json()["error"]["code"]


@pytest.mark.parametrize("path", [b"/live", b"/v1/completions"])
@pytest.mark.parametrize("trailer", [b"a: b\r\n", b"a: b", b"a"])
def test_trailers_are_refused(front: Front, path: bytes, trailer: bytes) -> None:
    chunks = b"2\r\n{}\r\n0\r\n" + trailer + b"z" * (20 << 10) * (len(trailer) < 6) + b"\r\n\r\n"
    with front.connect() as connection:
        connection.sendall(CHUNKED % path + chunks)
        assert error_of(read_all(connection)) == (400, "invalid_http")


@pytest.mark.parametrize("piece", [b"a: b\r\n" * 10_000, SOME], ids=["lines", "one value"])
def test_trailers_that_have_no_end_end_the_connection(front: Front, piece: bytes) -> None:
    with front.connect() as connection:
        connection.sendall(CHUNKED.replace(b"POST", b"GET") % b"/live" + b"0\r\n")
        assert b" 200 " in read_answer(connection)
        connection.sendall(b"a: ")
        assert send_all(connection, piece, MANY) < MANY


@pytest.mark.parametrize("chunks", [b"1\r\nx\r\n" * 20_000, b"1;" + SOME], ids=["small", "extended"])
def test_chunks_that_are_mostly_framing_are_refused(front: Front, chunks: bytes) -> None:
    with front.connect() as connection:
        connection.sendall(CHUNKED % b"/v1/completions" + chunks)
        assert error_of(read_all(connection)) == (400, "invalid_http")


def test_a_body_in_small_chunks_is_read(front: Front) -> None:
    body = b'{"prompt": "' + b"x" * 100_000 + b'"}'
    pieces = [body[at : at + 8] for at in range(0, len(body), 8)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    with front.connect() as connection:
        connection.sendall(CHUNKED % b"/v1/completions" + chunks + b"0\r\n\r\n")
        assert b" 200 " in read_answer(connection)


def test_pipelined_requests_beyond_16_that_wait_are_refused_after_the_answers_to_those(front: Front) -> None:
    with front.open_raw("/v1/completions", prompt="silence") as connection:
        request = wait_request(front, "silence")
        connection.sendall(LIVE * 8000)
        for _ in range(3):  # the server has read enough of them when it answers another caller
            assert front.http.get("/live").status_code == 200
        front.ring.send(output(request, "a", finish=finish()))
        data = read_all(connection)
    *answers, refusal = data.split(b"HTTP/1.1 ")[1:]
    assert [each[:3] for each in answers] == [b"200"] * 17
    assert error_of(b"HTTP/1.1 " + refusal) == (503, "too_many_pipelined")
    assert b"retry-after: " in refusal.lower()


def test_a_client_that_leaves_with_a_request_behind_another_has_left_both(front: Front) -> None:
    with front.open_raw("/v1/completions", prompt="silence first") as connection:
        request = wait_request(front, "silence first")
        connection.sendall(LIVE)
    front.ring.wait_for(lambda: request.handle in front.ring.aborted())


def test_16_pipelined_requests_are_answered_and_more_behind_them(front: Front) -> None:
    with front.connect() as connection:
        for _ in range(3):
            connection.sendall(LIVE * 17)
            data = b""
            while data.count(b"HTTP/1.1 200") < 17:
                part = connection.recv(1 << 16)
                assert part, "closed before all were answered"
                data += part


def test_a_connection_whose_answer_is_out_and_whose_request_has_no_end_is_closed(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carousel.server.http.protocol.UNREAD_TIMEOUT_S", 0.05, raising=False)
    with front.connect() as connection:
        connection.sendall(LIVE.replace(b"\r\n\r\n", b"\r\nContent-Length: 1000\r\n\r\n"))
        assert b" 200 " in read_answer(connection)
        assert not drip(connection, 900)


def test_a_body_that_comes_after_its_answer_leaves_the_connection_as_it_was(front: Front) -> None:
    with front.connect() as connection:
        connection.sendall(LIVE.replace(b"\r\n\r\n", b"\r\nContent-Length: 1000\r\n\r\n"))
        assert b" 200 " in read_answer(connection)
        connection.sendall(b"x" * 1000 + LIVE)
        assert b" 200 " in read_answer(connection)


@pytest.mark.parametrize(("version", "first"), [(b"1.0", b"200 OK"), (b"1.1", b"100 Continue")])
def test_a_client_that_knows_no_interim_answers_gets_none(front: Front, version: bytes, first: bytes) -> None:
    head = b"POST /tokenize HTTP/%b\r\n" % version + JSON
    expecting = b"Connection: close\r\nExpect: 100-continue\r\nContent-Length: 14\r\n\r\n"
    with front.connect() as connection:
        connection.sendall(head + expecting + b'{"prompt":"x"}')
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 " + first)
    assert answer.count(b"200 OK") == 1


def test_a_body_behind_a_request_to_change_the_protocol_is_read_as_a_body(front: Front) -> None:
    """Some HTTP clients ask for HTTP/2 with every request that they send over plain TCP."""
    upgrade = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    with front.open_raw("/v1/completions", headers=upgrade, prompt="x") as connection:
        connection.sendall(LIVE)
        data = b""
        while data.count(b"HTTP/1.1 ") < 2:
            data += connection.recv(1 << 16)
    assert data.count(b"HTTP/1.1 200") == 2


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /live HTTP/1.1\r\n\r\n", 400),
        (b"GET /live HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", 400),
        (b"GET /live HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET /live HTTP/1.0\r\n\r\n", 200),
        (b"GET /live HTTP/1.1\r\nConnection: close\r\nhOST: a\r\n\r\n", 200),
    ],
)
def test_a_request_names_one_host(front: Front, head: bytes, status: int) -> None:
    assert front.exchange(head).status_code == status


def large_body(size: int, length: int) -> bytes:
    """Return the beginning, of `size` bytes, of a request with a body of `length`, whose prompt is cut."""
    head = b"POST /v1/completions HTTP/1.1\r\n" + JSON + b"Content-Length: %d\r\n\r\n" % length
    start, end = b'{"truncate_prompt_tokens": 1, "prompt": "another', b'"}'
    body = start + b" " * (length - len(start) - len(end)) + end
    return head + body[:size]


def pool_has(pool: BodyPool, num_bytes: int) -> bool:
    return pool.num_bytes >= num_bytes


def test_large_bodies_share_their_room_and_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool of four of the largest bodies: three half ones, and the oldest, which comes to its end."""
    pool = BodyPool(lambda: False, largest=MIB, size=4 * MIB)

    def with_pool(*about: Any) -> ServerState:
        state = ServerState(*about)
        state.bodies = pool
        return state

    monkeypatch.setattr("carousel.server.main.ServerState", with_pool)
    monkeypatch.setattr("carousel.server.http.body_pool.WAIT_S", 0.3)
    with http_front(tmp_path, answer) as front, ExitStack() as held:
        connections = [held.enter_context(front.connect()) for _ in range(5)]
        for number, connection in enumerate(connections):
            connection.sendall(large_body(MIB - 100, MIB))
            if number < 3:
                wait_until(partial(pool_has, pool, (number + 1) * (MIB - 100)), 5.0, "a body is read")
        for connection in connections[3:]:
            answered = read_answer(connection)
            assert error_of(answered) == (503, "bodies_overloaded")
            assert b"retry-after: " in answered.lower()
        # A small body takes no part.
        assert front.complete().status_code == 200
        connections[0].sendall(large_body(MIB, MIB)[-100:])
        assert b" 200 " in read_answer(connections[0])
        with front.connect() as another:
            another.sendall(large_body(MIB, MIB))
            assert b" 200 " in read_answer(another)


def test_a_bad_key_is_answered_before_the_body_which_is_then_passed_over(tmp_path: Path) -> None:
    """A client that is still sending when its connection is closed may never see the answer."""
    with http_front(tmp_path, answer, api_key="secret") as front:
        head = b"POST /v1/completions HTTP/1.1\r\n" + JSON
        for framing, body in (
            (b"Content-Length: %d\r\n" % MIB, b"x" * MIB),
            (b"Transfer-Encoding: chunked\r\n", b"%x\r\n%b\r\n0\r\n\r\n" % (MIB, b"x" * MIB)),
        ):
            with front.connect() as connection:
                connection.sendall(head + framing + b"\r\n")
                assert error_of(read_answer(connection)) == (401, "invalid_api_key")
                connection.sendall(body + LIVE)
                assert b" 200 " in read_answer(connection)
