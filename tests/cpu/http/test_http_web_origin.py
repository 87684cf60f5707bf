"""A page of another site can have a browser send nothing that the server serves: Host, Origin, GET."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest

from carousel.server.admin import probes
from carousel.server.endpoints import ENDPOINTS
from carousel.server.http.web_origin import WebOriginMiddleware
from carousel.server.server_state import ServerState
from runtime.wire.messages import ControlRequest, GenerateRequest, QuestionOp, SequenceOutput
from tests.cpu.http.test_http_control import INFO
from tests.harness.http.http_front import Front, http_front
from tests.harness.ring.fake_ring import WAIT_S, finish, output, spell
from tests.harness.ring.launched import wait_until

ORIGIN = "https://page.example"


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    settings = {"allowed_hosts": "llm.example, *.apps.example", "cors_origins": ORIGIN}
    with http_front(tmp_path_factory.mktemp("run"), spell("abc"), **settings) as front:
        yield front


def ask(
    front: Front, *, path: str = "/v1/completions", method: str = "POST", **headers: str
) -> httpx.Response:
    body: dict[str, Any] = {"json": {"prompt": "x"}} if method == "POST" else {}
    return front.http.request(method, path, headers=headers, **body)


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1:80", "203.0.113.7", "[::1]:30000", "localhost:30000", "LOCALHOST.", "carousel", "x_y"),
        *("a.localhost", "gpu.local:1", "svc.cluster.local", "host.docker.internal", socket.gethostname()),
        *("llm.example", "LLM.example.:443", "a.apps.example", "b.a.apps.example"),
    ],
)
def test_a_name_that_nobody_else_can_own_is_served(front: Front, host: str) -> None:
    assert ask(front, Host=host).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "127.0.0.1.evil.example:30000", "llm.example.evil", "apps.example", "a.xlocal"),
        *("evil.local.example", "a.example@127.0.0.1", "127.0.0.1 x.example", ""),
    ],
)
@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/completions"), ("GET", "/live"), ("GET", "/stats")]
)
def test_any_other_is_refused_and_the_flag_is_named(front: Front, host: str, method: str, path: str) -> None:
    seen = len(front.ring.requests)
    response = ask(front, method=method, path=path, Host=host)
    assert response.status_code == 403
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("Host", "host_not_allowed")
    assert "--allowed-hosts" in error["message"]
    assert "x-request-id" in response.headers
    assert len(front.ring.requests) == seen


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET http://evil.example/v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n", 403),
        (b"GET HTTP://evil.EXAMPLE.:80/live HTTP/1.1\r\nHost: localhost\r\n\r\n", 403),
        (b"GET http://evil.example/live HTTP/1.0\r\n\r\n", 403),
        (b"OPTIONS http://evil.example HTTP/1.1\r\nHost: localhost\r\n\r\n", 403),
        (b"GET http://evil.example?/live HTTP/1.1\r\nHost: localhost\r\n\r\n", 403),
        (b"GET http://localhost@evil.example/live HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET http://evil.example@localhost/live HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET https://localhost/live HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET ftp://localhost/live HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET http:///live HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET http://localhost/live HTTP/1.1\r\nConnection: close\r\n\r\n", 400),
        (b"GET http://localhost/live HTTP/1.1\r\nHost: \r\n\r\n", 200),
        (b"GET http://llm.example:80/live?x=http://a/b HTTP/1.1\r\nHost: evil.example\r\n\r\n", 200),
        (b"GET http://[::1]:80/live HTTP/1.0\r\n\r\n", 200),
        (b"GET http://localhost?x HTTP/1.1\r\nHost: localhost\r\n\r\n", 200),
        (b"GET http://localhost HTTP/1.1\r\nHost: localhost\r\n\r\n", 200),
        (b"GET http://x/live HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n", 200),
    ],
)
def test_the_host_of_a_whole_address_counts_and_not_that_of_the_header(
    front: Front, head: bytes, status: int
) -> None:
    ended = head.replace(b"\r\nHost:", b"\r\nConnection: close\r\nHost:")
    assert front.exchange(ended).status_code == status


def test_a_page_of_another_origin_reaches_nothing(front: Front) -> None:
    seen = len(front.ring.requests)
    for origin in ("http://evil.example", "null", "http://localhost:8080", f"{ORIGIN}.evil", "file://"):
        for method, path in (
            ("POST", "/v1/completions"),
            ("GET", "/health_generate"),
            ("OPTIONS", "/generate"),
        ):
            response = ask(front, method=method, path=path, Origin=origin)
            assert response.status_code == 403
            assert "--cors-origins" in response.json()["error"]["message"]
    assert len(front.ring.requests) == seen


@pytest.mark.parametrize(
    ("proxies", "target", "status"),
    [
        ("", "https://localhost/live", 400),
        ("10.0.0.1, ::1", "https://localhost/live", 400),
        ("10.0.0.1, 127.0.0.0/8", "https://localhost/live", 200),
        ("127.0.0.1", "HTTPS://localhost:443/live", 200),
        ("*", "https://localhost/live", 200),
        ("*", "https://evil.example/live", 403),
        ("*", "ftp://localhost/live", 400),
    ],
)
def test_a_proxy_that_ends_tls_may_send_the_address_that_it_was_asked_for(
    tmp_path: Path, proxies: str, target: str, status: int
) -> None:
    with http_front(tmp_path, spell("abc"), forwarded_allow_ips=proxies) as front:
        head = f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        response = front.exchange(head.encode())
    assert response.status_code == status
    assert status != 400 or "--forwarded-allow-ips" in response.json()["error"]["message"]


FROM_AN_IMAGE = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}
FROM_A_FRAME = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}
FROM_A_SISTER = {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "script"}
A_LINK = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
THE_ADDRESS_BAR = {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
THE_OWN_PAGE = {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors", "Sec-Fetch-Dest": "empty"}
PATHS = sorted({(method, each.path) for each in ENDPOINTS for method in each.methods})


def spelled(path: str) -> str:
    """The path with something in each of its places."""
    return path.replace("{name:path}", "fake").replace("{request_id:path}", "x").replace("{file}", "x")


def reached(front: Front) -> int:
    """How much of what came to the server went on to the ring."""
    return len(front.ring.requests) + len(front.ring.arrivals)


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_what_a_browser_sends_for_a_page_of_another_site_reaches_nothing(
    front: Front, method: str, path: str
) -> None:
    """A form, fetch without CORS, an image, a script, a frame: with any type that needs no preflight."""
    path = spelled(path)
    seen = reached(front)
    forms: list[dict[str, str]] = [
        {"Origin": origin, "Content-Type": kind}
        for origin in ("https://evil.example", "null")
        for kind in ("text/plain", "application/x-www-form-urlencoded", "application/json")
    ]
    for headers in (FROM_AN_IMAGE, FROM_A_FRAME, FROM_A_SISTER, *forms):
        response = front.http.request(method, path, headers=headers, content=b'{"text":"x"}')
        assert response.status_code == 403
        assert "--cors-origins" in response.json()["error"]["message"]
    if method == "POST":
        assert front.http.request(method, path, headers=A_LINK).status_code == 403
    assert reached(front) == seen


def test_a_link_the_address_bar_and_the_own_page_are_served(front: Front) -> None:
    for headers in (A_LINK, THE_ADDRESS_BAR, THE_OWN_PAGE):
        assert front.http.get("/", headers={**headers, "Accept": "text/html"}).status_code == 200
        assert front.http.get("/live", headers=headers).status_code == 200
    assert ask(front, **THE_OWN_PAGE).status_code == 200


def test_without_a_header_of_a_browser_a_command_is_served(front: Front) -> None:
    """That is a caller of one's own, such as curl."""
    assert front.http.post("/flush_cache").status_code == 200
    assert front.http.post("/generate", content=b"{}", headers={"Content-Type": "text/plain"}).is_error


def test_the_servers_own_pages_and_those_that_are_named_are_served(front: Front) -> None:
    own = {"Host": "llm.example", "Origin": "https://llm.example"}
    assert ask(front, **own).status_code == 200
    assert ask(front, **{**own, "Host": "localhost"}).status_code == 403, "a page of another server"
    response = ask(front, Origin=ORIGIN)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == ORIGIN
    asked = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    assert ask(front, method="OPTIONS", **asked).headers["access-control-allow-origin"] == ORIGIN


def test_stars_stand_for_all(tmp_path: Path) -> None:
    with http_front(tmp_path, spell("abc"), allowed_hosts="*", cors_origins="*") as front:
        assert ask(front, Host="evil.example", Origin="http://other.example").status_code == 200


@pytest.mark.parametrize(("hosts", "status"), [("", 200), ("llm.example", 403)])
def test_with_a_key_only_a_list_that_was_given_counts(tmp_path: Path, hosts: str, status: int) -> None:
    with http_front(tmp_path, spell("abc"), api_key="secret", allowed_hosts=hosts) as front:
        front.http.headers["Authorization"] = "Bearer secret"
        assert ask(front, Host="any.example", Origin="http://any.example").status_code == status
        # Nothing but a caller with the key can send this.
        assert front.http.get("/flush_cache").status_code == 200


def test_without_a_key_no_get_changes_anything(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    response = front.http.get("/flush_cache")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert front.http.post("/flush_cache").json()["op"] == "flush_cache"
    assert list(front.http.get("/openapi.json").json()["paths"]["/flush_cache"]) == ["post"]
    seen = len(front.ring.arrivals)
    monkeypatch.setattr(front.ring, "info", INFO)
    for endpoint in ENDPOINTS:
        if "GET" in endpoint.methods_with(has_key=False):
            assert front.http.get(spelled(endpoint.path)).status_code in (200, 404, 503)
    asked = [message for _, message in front.ring.arrivals[seen:]]
    ops = {message.op for message in asked if isinstance(message, ControlRequest)}
    assert ops == set(get_args(QuestionOp)) - {"flush_cache"}
    assert {type(message) for message in asked} <= {ControlRequest, GenerateRequest}, "/health_generate"


def test_all_who_ask_for_the_deep_check_at_once_share_one_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[GenerateRequest] = []
    num_checks, look = 0, probes._seen

    def seen(server: ServerState) -> tuple[str, str]:
        nonlocal num_checks
        num_checks += 1
        return look(server)

    monkeypatch.setattr(probes, "_seen", seen)

    def answer(request: GenerateRequest) -> list[SequenceOutput]:
        asked.append(request)
        return []

    with http_front(tmp_path, answer) as front:
        line = b"GET /health_generate HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        connections = [front.connect() for _ in range(16)]
        for connection in connections:
            connection.sendall(line)
        request = front.ring.wait_request(0)
        wait_until(lambda: num_checks == len(connections), 5.0, "all have asked")
        front.ring.send(output(request, "a", finish=finish()))
        for connection in connections:
            connection.settimeout(WAIT_S)
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
            connection.close()
        assert len(asked) == 1
        front.ring.answer = spell("a")
        assert front.http.get("/health_generate").status_code == 200, (
            "the next one who asks has one of his own"
        )


async def _nobody(*_: Any) -> Any:
    raise AssertionError("nothing is served")


@pytest.mark.parametrize("host", [b"", b"evil.example"])
def test_the_first_to_ask_is_refused_as_any_other(host: bytes) -> None:
    """The latest name that was served is remembered; before it there is none."""
    middleware = WebOriginMiddleware(_nobody, own_hosts=(), allowed_hosts=(), origins=())
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "path": "/", "headers": [(b"host", host)]}
    asyncio.run(middleware(scope, _nobody, send))
    assert sent[0]["status"] == 403
