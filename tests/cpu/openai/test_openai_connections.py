"""The HTTP server over a fake ring: bodies, keys, probes, disconnects, shutdown."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import socket
import struct
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from carousel.server.admin.metrics import Metrics
from carousel.server.answer.departure import run_until_disconnect
from carousel.server.server_state import ServerState
from runtime.base.errors import RingClosed
from runtime.checkpoint.checkpoint_config import SamplingDefaults
from runtime.wire.messages import GenerateRequest, SequenceOutput
from tests.harness.http.http_front import CONFIG, Front, http_front
from tests.harness.ring.fake_ring import WAIT_S, fake_ring, finish, output, spell
from tests.harness.ring.launched import SLACK

JSON = {"content-type": "application/json"}
MIB = 1 << 20


def one_letter(request: GenerateRequest) -> list[SequenceOutput]:
    return [output(request, "a")] if request.stream else []


def answer(request: GenerateRequest) -> list[SequenceOutput]:
    """Return what the first word of the prompt asks for; "abc" by default."""
    answers = {"silence": lambda _: [], "letter": one_letter}
    return answers.get(said(request).partition(" ")[0], spell("abc"))(request)


def said(request: GenerateRequest) -> str:
    """The prompt, or the last message."""
    return request.messages[-1].content if request.messages else request.text or ""


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    run_dir = tmp_path_factory.mktemp("run")
    with http_front(run_dir, answer, log_level="info", slow_reader_timeout=0.1) as front:
        yield front


def status_of(response: httpx.Response) -> int:
    """The status of an error, whose body must have the shape of OpenAI's."""
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    return response.status_code


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": ' + b"[" * 100_000,
        b'{"metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "seed": 123456789012345678901234567890}',
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_body_that_is_no_request_is_a_400(front: Front, path: str, body: bytes) -> None:
    assert status_of(front.http.post(path, content=body, headers=JSON)) == 400


def test_a_body_beyond_the_limit_is_refused_by_its_length_and_while_it_comes(front: Front) -> None:
    assert status_of(front.http.post("/v1/completions", content=b" " * (9 * MIB), headers=JSON)) == 413

    def endless() -> Iterator[bytes]:
        for _ in range(9):
            yield b" " * MIB

    assert status_of(front.http.post("/v1/completions", content=endless(), headers=JSON)) == 413


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"not http at all\r\n\r\n", 400),
        (b"GET /live HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (b"GET /live HTTP/1.1\r\n" + b"X: y\r\n" * 65 + b"\r\n", 431),
        (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"GET /live HTTP/1.1\r\nX: " + b"y" * (33 << 10) + b"\r\n\r\n", 431),
        (b"GET /live?" + b"y" * (33 << 10) + b" HTTP/1.1\r\n\r\n", 431),
    ],
)
def test_a_head_that_is_wrong_or_too_large_is_refused_in_the_shape_of_openai(
    front: Front, head: bytes, status: int
) -> None:
    assert status_of(front.exchange(head)) == status


def test_what_follows_a_request_and_is_wrong_does_not_fall_into_its_answer(front: Front) -> None:
    connection = front.open_raw("/v1/completions", prompt="letter garbage", stream=True)
    received = b""
    while b"data: " not in received:
        received += connection.recv(4096)
    connection.sendall(b"not http at all\r\n\r\n")
    assert b"HTTP/1.1 400" not in read_all(connection)
    (request,) = wait_requests(front, "letter garbage", 1)
    front.ring.wait_for(lambda: request.handle in front.ring.aborted())


def test_a_head_that_never_ends_is_refused_while_it_comes(front: Front) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"GET /live HTTP/1.1\r\nX: "
        while True:
            yield b"y" * 4096

    assert status_of(front.exchange(pieces())) == 431


def test_a_head_that_does_not_come_in_time_is_refused(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = front.open_raw("/v1/completions", prompt="silence timer")
    (request,) = wait_requests(front, "silence timer", 1)
    monkeypatch.setattr("carousel.server.http.protocol.HEAD_TIMEOUT_S", 0.02)
    assert status_of(front.exchange(b"")) == 408
    assert status_of(front.exchange(b"GET /live HTTP/1.1\r\nX: ")) == 408
    # The time limit is for the head alone, also where some clients send a line break behind the body.
    connection.sendall(b"\r\n")
    connection.settimeout(0.05)
    with pytest.raises(TimeoutError):
        connection.recv(1)
    front.ring.send(output(request, "a", finish=finish()))
    connection.settimeout(WAIT_S)
    assert b" 200 " in connection.recv(4096)
    connection.close()


def test_a_large_body_after_its_head_does_not_count_as_head(front: Front) -> None:
    body = json.dumps({"prompt": "x" * 100_000}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: %d\r\n" % len(body)
    with socket.create_connection(("127.0.0.1", front.port), timeout=WAIT_S) as connection:
        for pieces in ([head + b"\r\n", body], [head, b"\r\n" + body]):
            for piece in pieces:
                connection.sendall(piece)
                # The server has read this piece when it answers another caller.
                assert front.http.get("/live").status_code == 200
            received = b""
            while not received.endswith(b"}}}"):
                received += connection.recv(65536)
            assert b" 200 " in received


def test_only_plain_json_is_accepted(front: Front) -> None:
    body = b'{"prompt": "x"}'
    gzip = {**JSON, "content-encoding": "gzip"}
    assert status_of(front.http.post("/v1/completions", content=body, headers=gzip)) == 415
    text = {"content-type": "text/plain"}
    assert status_of(front.http.post("/v1/completions", content=body, headers=text)) == 415
    charset = {"content-type": "application/json; charset=utf-8"}
    assert front.http.post("/v1/completions", content=body, headers=charset).status_code == 200


def test_with_a_key_only_the_probes_are_open(tmp_path: Path) -> None:
    with http_front(tmp_path, spell("a"), api_key="secret") as front:
        for path in ("/live", "/ready", "/health"):
            assert front.http.get(path).status_code == 200
        for given in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            assert status_of(front.http.get("/v1/models", headers=given)) == 401
            assert status_of(front.http.get("/nope", headers=given)) == 401
        for right in ("Bearer secret", "bearer  secret"):
            assert front.http.get("/v1/models", headers={"authorization": right}).status_code == 200
        two = [("authorization", "Bearer wrong"), ("authorization", "Bearer secret")]
        assert status_of(front.http.get("/v1/models", headers=two)) == 401


@pytest.mark.parametrize("role", ["scheduler", "worker", "tokenizer", "detokenizer"])
def test_ready_names_the_role_that_is_not(front: Front, role: str) -> None:
    front.ring.set_all("ready")
    assert front.http.get("/ready").status_code == 200
    front.ring.set_state(role, "loading")
    response = front.http.get("/ready")
    front.ring.set_all("ready")
    assert response.status_code == 503
    assert response.json()["role"] == role
    assert front.http.get("/live").status_code == 200


def test_ready_names_a_role_that_gives_no_sign_of_life(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    front.ring.set_all("ready")
    monkeypatch.setattr("carousel.server.admin.probes.STALLED_S", 0.0)
    response = front.http.get("/health")
    assert response.status_code == 503
    assert "no sign of life" in response.json()["reason"]


def test_a_launch_that_is_not_ready_or_is_ending_refuses_at_once(front: Front) -> None:
    for state, code in (("loading", "not_ready"), ("draining", "shutting_down")):
        front.ring.set_state("launcher", state)
        response = front.complete()
        front.ring.set_all("ready")
        assert status_of(response) == 503
        assert response.json()["error"]["code"] == code
        assert "retry-after" in response.headers


def test_a_launch_that_has_failed_is_not_called_not_ready_yet(tmp_path: Path) -> None:
    client: Any = SimpleNamespace(error=None, is_connected=True)
    with fake_ring(tmp_path) as ring:
        state = ServerState(client, CONFIG, SamplingDefaults(), ring.status, Metrics("m", tmp_path))
        state.check_serving()
        ring.set_state("launcher", "failed")
        with pytest.raises(RingClosed):
            state.check_serving()
        ring.set_all("ready")
        client.error = RingClosed("gone")
        with pytest.raises(RingClosed, match="gone"):
            state.check_serving()


def leave(connection: socket.socket, *, reset: bool) -> None:
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def wait_requests(front: Front, text: str, number: int) -> list[GenerateRequest]:
    def found() -> list[GenerateRequest]:
        requests = [request for request in front.ring.requests if said(request) == text]
        return requests if len(requests) == number else []

    return front.ring.wait_for(found)


@pytest.mark.parametrize("reset", [False, True], ids=["FIN", "RST"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("word", ["silence", "letter"])
@pytest.mark.parametrize(
    ("path", "name", "number"), [("completions", "prompt", 2), ("responses", "input", 1)]
)
def test_a_client_that_leaves_has_its_requests_aborted_at_once(
    front: Front, path: str, name: str, number: int, stream: bool, reset: bool, word: str
) -> None:
    prompt = f"{word} {path} {stream} {reset}"
    asked: dict[str, Any] = {name: [prompt] * number if number > 1 else prompt, "stream": stream}
    connection = front.open_raw(f"/v1/{path}", **asked)
    handles = {request.handle for request in wait_requests(front, prompt, number)}
    if stream and word == "letter":
        received = b""
        while b"data: " not in received:
            received += connection.recv(4096)
    began = time.monotonic()
    leave(connection, reset=reset)
    front.ring.wait_for(lambda: handles <= set(front.ring.aborted()))
    assert time.monotonic() - began < 0.5 * SLACK


@pytest.mark.parametrize(("num_clients", "share", "num_left"), [(1, 0, 2), (2, 0, 1), (1, 3, 1)])
def test_a_server_that_has_its_share_of_the_queue_refuses_by_itself(
    tmp_path: Path, num_clients: int, share: int, num_left: int
) -> None:
    """Its share is three quarters, and all of it while no other client is connected, unless one was set."""
    queue = {"max_running_requests": 2, "max_queued_requests": 4, "max_queued_requests_per_client": share}
    with http_front(tmp_path, answer, **queue) as front:
        front.ring.set_state("detokenizer", "ready", num_clients=num_clients)
        waiting = [front.open_raw("/v1/completions", prompt="silence", n=n) for n in (2, 2, num_left)]
        wait_requests(front, "silence", 3)
        refused = front.complete()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "client_overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        assert len(front.ring.requests) == 3
        for connection in waiting:
            connection.close()
        front.ring.wait_for(lambda: len(front.ring.aborted()) == 4 + num_left)


@pytest.mark.parametrize("body", [{"n": 7}, {"n": 2, "prompt": ["x"] * 4, "stream": True}])
@pytest.mark.parametrize("queue", [{"max_queued_requests": 4}, {"max_queued_requests_per_client": 4}])
def test_what_can_never_have_room_is_refused_for_good(
    tmp_path: Path, queue: dict[str, int], body: dict[str, Any]
) -> None:
    with http_front(tmp_path, answer, max_running_requests=2, **queue) as front:
        refused = front.complete(**body)
        assert refused.status_code == 400
        message = refused.json()["error"]["message"]
        assert re.match(r"[78] sequences at once; this server runs and queues 6 at most", message)
        assert not front.ring.requests


def test_prompts_that_are_not_begun_together_need_no_room_together(tmp_path: Path) -> None:
    with http_front(tmp_path, answer, max_running_requests=2, max_queued_requests=4) as front:
        waiting = front.open_raw("/v1/completions", prompt="silence", n=2)
        wait_requests(front, "silence", 1)
        assert front.complete(prompt=["x"] * 20).status_code == 200
        waiting.close()


def has_aborted(front: Front, number: int) -> bool:
    return len(front.ring.aborted()) == number


@pytest.mark.parametrize("size", [200, 70_000, 200_000, 2_000_000])
def test_a_client_is_seen_to_leave_however_large_its_body_was(tmp_path: Path, size: int) -> None:
    """While a large body is read, reading pauses whenever the application is behind."""
    with http_front(tmp_path, answer, context_length=1 << 21) as front:
        for number in range(1, 9):
            with front.open_raw("/v1/completions", prompt="silence" + " x" * (size // 2)):
                front.ring.wait_request(number - 1)
            front.ring.wait_for(partial(has_aborted, front, number))


def test_nothing_is_begun_for_a_client_that_has_left_already() -> None:
    begun: list[str] = []

    async def work() -> None:
        begun.append("request")

    asyncio.run(run_until_disconnect({"has_left": lambda: True, "watch": lambda _: None}, work()))
    assert not begun


def is_held(front: Front, connection: socket.socket) -> bool:
    """Return True while the server has its end of the connection open; the kernel may hold it for longer."""
    ends = (f":{front.port:04X}", f":{connection.getsockname()[1]:04X}")
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    of_nobody = "0"
    return any((row[1][8:], row[2][8:]) == ends and row[9] != of_nobody for row in rows)


def test_a_request_that_is_cancelled_before_it_begins_leaves_nothing_behind() -> None:
    """The end of the server may come in that turn of its loop."""

    async def main() -> None:
        async def work() -> None:
            raise AssertionError("it has begun")

        begun = work()
        watching: list[Any] = []
        state: dict[str, Any] = {"has_left": lambda: False, "watch": watching.append}
        asked = asyncio.create_task(run_until_disconnect(state, begun))
        asyncio.get_running_loop().call_soon(asked.cancel)
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert inspect.getcoroutinestate(begun) == inspect.CORO_CLOSED
        assert watching[1:] == [None], "nothing refers to the request any more"
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_a_client_that_does_not_read_loses_its_request_and_its_connection(front: Front) -> None:
    connection = front.open_raw("/v1/completions", prompt="silence unread", stream=True)
    (request,) = wait_requests(front, "silence unread", 1)
    for text in "xy":
        front.ring.send(output(request, text * MIB, token_ids=b""))
    front.ring.wait_for(lambda: request.handle in front.ring.aborted())
    # Though not all of its output was taken.
    front.ring.wait_for(lambda: not is_held(front, connection))
    connection.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_does_not_read_the_end_loses_its_connection(front: Front, stream: bool) -> None:
    prompt = f"silence to the end {stream}"
    connection = front.open_raw("/v1/completions", prompt=prompt, stream=stream)
    (request,) = wait_requests(front, prompt, 1)
    front.ring.send(output(request, "x" * 8 * MIB, token_ids=b"", finish=finish()))
    front.ring.wait_for(lambda: not is_held(front, connection))
    connection.close()


def test_sigterm_ends_open_streams_with_an_error_within_a_second(tmp_path: Path) -> None:
    with http_front(tmp_path, one_letter) as front:
        streaming = front.open_raw("/v1/completions", prompt="x", stream=True)
        waiting = front.open_raw("/v1/completions", prompt="x")
        front.ring.wait_request(1)
        received = b""
        while b"data: " not in received:
            received += streaming.recv(4096)
        began = time.monotonic()
        front.stop.set()
        front.join()
        assert time.monotonic() - began < SLACK
        assert b'"shutting_down"' in received + read_all(streaming)
        assert b" 503 " in read_all(waiting)


def test_a_ring_that_is_gone_ends_callers_and_the_process(tmp_path: Path) -> None:
    with http_front(tmp_path) as front:
        waiting = front.open_raw("/v1/completions", prompt="x")
        front.ring.wait_request()
        front.ring.set_state("launcher", "failed")
        assert b'"runtime_closed"' in read_all(waiting)
        front.join()
        assert isinstance(front.error, RingClosed)


def read_all(connection: socket.socket) -> bytes:
    connection.settimeout(WAIT_S)
    with connection:
        data = b""
        while part := connection.recv(4096):
            data += part
        return data


def test_logs_hold_no_prompt(front: Front, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    front.complete(prompt="a very private prompt")
    front.complete(prompt="a very private prompt", temperature="a very private value")
    texts: list[Any] = [record.getMessage() for record in caplog.records]
    assert any("/v1/completions" in text for text in texts)
    assert not any("private" in text for text in texts)
