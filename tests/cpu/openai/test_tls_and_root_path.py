"""HTTPS by the server itself, and a server behind a proxy that serves it below a path of its own."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import openai
import pytest

from carousel.http_client import HttpClient, RequestFailure, parts_of
from carousel.server.http.connection_count import ConnectionCount
from carousel.server.http.tls import tls_reader
from carousel.server.openapi import describe
from tests.harness.http.http_front import CONFIG, Front, events, http_front
from tests.harness.http.tls import CERTIFICATE, FILES
from tests.harness.ring.fake_ring import WAIT_S, spell
from tests.harness.ring.launched import wait_until

TEXT = "abcdefgh"
MOST = 4
ROOT_PATH = "/llm/a"
KEY = "k-1"


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """Answers over TLS."""
    with http_front(tmp_path_factory.mktemp("tls"), spell(TEXT), max_connections=MOST, **FILES) as front:
        yield front


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """Stands behind a proxy, with a key."""
    folder = tmp_path_factory.mktemp("root")
    settings = {"root_path": ROOT_PATH, "api_key": KEY, "log_level": "info"}
    with http_front(folder, spell(TEXT), **settings) as front:
        yield front


# -- TLS -----------------------------------------------------------------------------------------------------


def test_answers_streams_and_kept_connections_go_over_tls(secure: Front) -> None:
    with secure.open_client() as http:
        assert str(http.base_url).startswith("https://")
        assert http.get("/ready").status_code == 200
        body = {"prompt": "x", "max_tokens": len(TEXT)}
        whole = http.post("/v1/completions", json=body)
        assert whole.json()["choices"][0]["text"] == TEXT
        *chunks, end = events(http.post("/v1/completions", json={**body, "stream": True}))
        assert end == "[DONE]"
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TEXT
        stream = whole.extensions["network_stream"]
        assert stream.get_extra_info("ssl_object").version() in ("TLSv1.2", "TLSv1.3")


def test_a_large_body_comes_whole_over_tls(secure: Front) -> None:
    """It is read in many pieces, into the buffer that all connections share."""
    texts = [f"{number:04d}" * 1024 for number in range(256)]
    with secure.open_client() as http:
        answer = http.post("/v1/completions", json={"prompt": texts, "max_tokens": len(TEXT)})
        assert [choice["text"] for choice in answer.json()["choices"]] == [TEXT] * len(texts)
    assert sorted(each.text or "" for each in secure.ring.requests if each.text != "x") == texts
    with secure.open_client() as http:
        assert http.get("/live").status_code == 200


def test_openais_client_trusts_the_certificate_that_it_is_given(secure: Front) -> None:
    trusted = httpx.Client(verify=ssl.create_default_context(cafile=str(CERTIFICATE)), timeout=WAIT_S)
    base_url = f"https://127.0.0.1:{secure.port}/v1"
    with openai.OpenAI(base_url=base_url, api_key="x", http_client=trusted, max_retries=0) as client:
        answer = client.completions.create(model="fake", prompt="x", max_tokens=len(TEXT))
        assert answer.choices[0].text == TEXT


def test_plain_http_and_an_unknown_certificate_are_no_answer(secure: Front) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{secure.port}/live", timeout=WAIT_S)
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"https://127.0.0.1:{secure.port}/live", timeout=WAIT_S)


def test_the_benchmark_client_speaks_https(secure: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """It trusts what OpenSSL does, for instance the file that SSL_CERT_FILE names."""
    url = f"https://127.0.0.1:{secure.port}"
    parts: list[bytes] = []

    async def exchange() -> None:
        http = HttpClient(url, {}, timeout_s=WAIT_S, clock=time.monotonic)
        try:
            await http.post("/v1/completions", b'{"prompt": "x", "max_tokens": 8}', parts_of(parts))
        finally:
            await asyncio.sleep(0.05)  # until asyncio has closed what it could not open

    with pytest.raises(RequestFailure, match="certificate"):
        asyncio.run(exchange())
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    asyncio.run(exchange())
    assert TEXT.encode() in b"".join(parts)


def test_connections_beyond_the_most_wait_and_are_served_over_tls_afterwards(secure: Front) -> None:
    """The server that accepts again does so with TLS."""
    trusted = ssl.create_default_context(cafile=str(CERTIFICATE))
    secure.http.close()
    with ExitStack() as held:
        raw = [held.enter_context(secure.connect()) for _ in range(2 * MOST)]
        for each in raw[:MOST]:
            _ask_live(held.enter_context(trusted.wrap_socket(each, server_hostname="localhost")))
        for each in raw[:MOST]:
            each.close()
    with secure.open_client() as http:
        assert http.get("/live").status_code == 200


def test_a_client_that_never_shakes_hands_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_reader, "HANDSHAKE_TIMEOUT_S", 0.2)
    with http_front(tmp_path, spell(TEXT), **FILES) as front, front.connect() as idle:
        assert front.http.get("/live").status_code == 200
        assert _is_cut_off(idle)
        assert front.http.get("/live").status_code == 200


def test_handshakes_are_connections_until_they_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls_reader, "HANDSHAKE_TIMEOUT_S", 0.2)
    counts: set[ConnectionCount] = set()
    add = ConnectionCount.add

    def note(count: ConnectionCount, address: str) -> bool:
        counts.add(count)
        return add(count, address)

    monkeypatch.setattr(ConnectionCount, "add", note)
    with ExitStack() as held:
        front = held.enter_context(http_front(tmp_path, spell(TEXT), max_connections=2, **FILES))
        front.http.close()
        for each in [held.enter_context(front.connect()) for _ in range(7)]:
            assert _is_cut_off(each)
        assert "all connections are in use" in caplog.text
        with front.open_client() as http:
            assert http.get("/live").status_code == 200
        (count,) = counts
        wait_until(lambda: count.total == 0, 5.0, "no connection is left")


def _ask_live(connection: ssl.SSLSocket) -> None:
    connection.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
    assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")


def _is_cut_off(connection: socket.socket) -> bool:
    connection.settimeout(WAIT_S)
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


# -- root path -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", ROOT_PATH])
def test_a_request_comes_with_the_root_path_or_without_it(behind: Front, prefix: str) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    body = {"prompt": "x", "max_tokens": len(TEXT)}
    answer = behind.http.post(f"{prefix}/v1/completions", json=body, headers=headers)
    assert answer.json()["choices"][0]["text"] == TEXT
    assert behind.http.get(f"{prefix}/v1/models/fake", headers=headers).json()["id"] == "fake"
    assert behind.http.get(f"{prefix}/live").status_code == 200, "as open as without it"
    for path in ("/v1/models", "/server_info", "/live/v1/models"):
        assert behind.http.get(f"{prefix}{path}").status_code == 401, "and no more"


@pytest.mark.parametrize("path", [f"{ROOT_PATH}{ROOT_PATH}/v1/models", f"{ROOT_PATH}x/v1/models", ROOT_PATH])
def test_only_the_root_path_itself_is_taken_off_and_once(behind: Front, path: str) -> None:
    answer = behind.http.get(path, headers={"Authorization": f"Bearer {KEY}"})
    assert answer.status_code == 404


def test_the_document_says_where_the_server_is(behind: Front) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    document = behind.http.get(f"{ROOT_PATH}/openapi.json", headers=headers).json()
    assert document["servers"] == [{"url": ROOT_PATH}]
    assert "/v1/models" in document["paths"]
    assert "servers" not in describe(CONFIG)


def test_probes_below_the_root_path_are_not_logged_either(
    behind: Front, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for path in (f"{ROOT_PATH}/live", "/live", f"{ROOT_PATH}/version?x=1"):
        behind.http.get(path)
    lines = (record.getMessage() for record in caplog.records if record.name == "uvicorn.access")
    assert [line.split()[3] for line in lines] == [f"{ROOT_PATH}/version?x=1"]
