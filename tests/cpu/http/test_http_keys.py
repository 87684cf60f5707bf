"""API keys of the HTTP server: who holds one, what its role may ask, and keys that come and go."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from carousel.server.app import make_app
from carousel.server.tenancy.tenant_table import TenantTable
from runtime.ring.endpoints import Endpoints
from runtime.ring.tenants import TenantsFile, read_tenants
from runtime.settings.config import RuntimeConfig
from runtime.wire.messages import GenerateRequest, SequenceOutput
from tests.cpu.http.test_http_control import INFO
from tests.harness.http.http_front import Front, http_front
from tests.harness.http.http_tenants import ROLES, authorization, caller, key_of, keys_file, tenants_front
from tests.harness.ring.fake_ring import finish, output, spell
from tests.harness.ring.launched import wait_until

USERS = {
    "/",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/generate",
    "/abort_request",
    "/v1/embeddings",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/tokenize",
    "/v1/tokenize",
    "/detokenize",
    "/v1/detokenize",
    "/v1/models",
    "/v1/models/{name:path}",
    "/version",
    "/model_info",
    "/get_model_info",
    "/weight_version",
    "/get_weight_version",
    "/health_generate",
    "/openapi.json",
}
SCRAPERS = {"/metrics", "/get_load"}
EVERYBODY = {"/live", "/ready", "/health"}


def answer(request: GenerateRequest) -> list[SequenceOutput]:
    if request.text == "begin":
        return [output(request, "a")]
    return spell("abc")(request)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Front, dict[str, httpx.Client]]]:
    with tenants_front(tmp_path_factory.mktemp("keys"), answer) as (front, callers):
        front.ring.info = INFO
        yield front, callers


def routes() -> list[tuple[str, str]]:
    """Method and path of every route."""

    class Server:
        config = RuntimeConfig(api_key="secret")
        tenants = TenantTable()

    server: Any = Server()
    found = [route for route in make_app(server).routes if isinstance(route, Route)]
    return [(method, route.path) for route in found for method in sorted((route.methods or set()) - {"HEAD"})]


def test_without_keys_nobody_looks_for_a_new_table() -> None:
    """Twenty times a second, in a process that may be idle."""
    asyncio.run(asyncio.wait_for(TenantTable().watch(60), 5))


def refused(response: httpx.Response, status: int) -> str:
    """The message of an error with this status."""
    assert response.status_code == status, response.text
    body = response.json()["error"]
    if response.json().get("type") == "error":  # Anthropic's form
        assert body["type"] == {401: "authentication_error", 403: "permission_error"}[status]
        return str(body["message"])
    assert {name: body[name] for name in ("type", "param", "code")} == {
        401: {"type": "invalid_request_error", "param": None, "code": "invalid_api_key"},
        403: {"type": "permission_error", "param": None, "code": "permission_denied"},
        404: {"type": "invalid_request_error", "param": None, "code": "not_found"},
    }[status]
    message: str = body["message"]
    return message


SERVED = (200, 415)
"""Without a body some are a 415: it was looked at."""


def filled(path: str) -> str:
    """Return a path with its parameters."""
    return (
        path.replace("{name:path}", "fake")
        .replace("{request_id:path}", "nobody")
        .replace("{file}", "none.json.gz")
    )


def is_unknown(path: str, response: httpx.Response) -> bool:
    """Return True if it was looked for: nobody's request has a timeline, and no profile was taken."""
    codes = {"/timelines/": "timeline_not_found", "/profiles/": "profile_not_found"}
    expected = next((code for prefix, code in codes.items() if path.startswith(prefix)), None)
    return expected is not None and response.json()["error"]["code"] == expected


@pytest.mark.parametrize(("method", "path"), routes())
def test_every_path_is_for_one_role_and_for_admins(
    served: tuple[Front, dict[str, httpx.Client]], method: str, path: str
) -> None:
    front, callers = served
    url = filled(path)
    role = "user" if path in USERS else "metrics" if path in SCRAPERS else "admin"
    if path in EVERYBODY:
        assert front.http.request(method, url).status_code == 200
        return
    assert "valid API key" in refused(front.http.request(method, url), 401)
    for name, own in ROLES.items():
        response = callers[name].request(method, url)
        if own in (role, "admin"):
            assert response.status_code in SERVED or is_unknown(path, response), response.text
        else:
            assert re.search(rf"\brole {role};.*is {own}$", refused(response, 403))


def test_a_path_that_is_not_there_is_so_for_every_key(
    served: tuple[Front, dict[str, httpx.Client]],
) -> None:
    front, callers = served
    for path in ("/nope", "/%2Fmetrics", "/stats/", "/live%2F..%2Fstats", "/v1"):
        refused(front.http.get(path), 401)
        for client in callers.values():
            refused(client.get(path), 404)


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"]
)
@pytest.mark.parametrize("header", ["Authorization: Bearer ", "x-api-key: "])
@pytest.mark.parametrize(("name", "status"), [("nobody", 401), ("mona", 403)])
def test_who_may_not_is_told_so_before_the_body_is_read(
    served: tuple[Front, dict[str, httpx.Client]], name: str, status: int, header: str, path: str
) -> None:
    front, _ = served
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with front.connect() as connection:
        connection.sendall(f"{head}Content-Length: 1000000\r\n{header}{key_of(name)}\r\n\r\n".encode())
        received = b""
        while b"}" not in received:
            received += connection.recv(65536)
        assert received.startswith(b"HTTP/1.1 %d " % status)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("x-api-key", "alice")], 200),
        ([("x-api-key", "nobody")], 401),
        ([("x-api-key", "")], 401),
        ([("x-api-key", "mona")], 403),
        ([("x-api-key", "alice"), ("authorization", "alice")], 200),
        ([("x-api-key", "alice"), ("authorization", "bob")], 401),
        ([("x-api-key", "nobody"), ("authorization", "alice")], 401),
        ([("x-api-key", "alice"), ("authorization", "nobody")], 401),
        ([("x-api-key", "alice"), ("x-api-key", "alice")], 401),
        ([("x-api-key", "alice"), ("x-api-key", "root")], 401),
        ([("authorization", "alice"), ("authorization", "alice")], 401),
    ],
)
@pytest.mark.parametrize("path", ["/version", "/v1/models"])
def test_a_key_in_either_header_is_the_same_key(
    served: tuple[Front, dict[str, httpx.Client]], headers: list[tuple[str, str]], status: int, path: str
) -> None:
    front, _ = served
    spelled = {"x-api-key": "", "authorization": "Bearer "}
    given = [(name, f"{spelled[name]}{key_of(who)}" if who else "") for name, who in headers]
    assert front.http.get(path, headers=given).status_code == status


def test_a_key_in_anthropics_header_is_not_one_of_another_scheme(
    served: tuple[Front, dict[str, httpx.Client]],
) -> None:
    front, _ = served
    for other in (f"Basic {key_of('alice')}", key_of("alice"), "Bearer"):
        refused(front.http.get("/version", headers={"Authorization": other}), 401)
        both = {"Authorization": other, "x-api-key": key_of("alice")}
        refused(front.http.get("/version", headers=both), 401)
    refused(front.http.get("/version", headers={"x-api-key": f"Bearer {key_of('alice')}"}), 401)


def test_open_metrics_need_no_role(tmp_path: Path) -> None:
    with tenants_front(tmp_path, metrics_open=True) as (front, callers):
        front.ring.info = INFO
        for client in (front.http, *callers.values()):
            assert client.get("/metrics").status_code == 200
        refused(front.http.get("/get_load"), 401)
        refused(callers["alice"].get("/get_load"), 403)


def test_without_keys_everybody_may_do_everything(tmp_path: Path) -> None:
    with http_front(tmp_path, answer) as front:
        front.ring.info = INFO
        for method, path in routes():
            if (method, path) != ("GET", "/flush_cache"):
                response = front.http.request(method, filled(path))
                assert response.status_code in SERVED or is_unknown(path, response), path


def test_the_description_says_which_role_a_path_is_for(
    served: tuple[Front, dict[str, httpx.Client]],
) -> None:
    _, callers = served
    paths = callers["alice"].get("/openapi.json").json()["paths"]
    operations = {(path, method): each for path in paths for method, each in paths[path].items()}

    def either(role: str) -> list[dict[str, list[str]]]:
        return [{"key": [role]}, {"x-api-key": [role]}]

    assert operations["/live", "get"]["security"] == []
    assert not {"401", "403", "429"} & operations["/live", "get"]["responses"].keys()
    assert operations["/metrics", "get"]["security"] == either("metrics")
    assert operations["/flush_cache", "post"]["security"] == either("admin")
    assert operations["/generate", "post"]["security"] == either("user")
    assert operations["/generate", "post"]["responses"].keys() >= {
        "401",
        "403",
        "429",
        "503",
    }
    for name in USERS - {"/v1/models/{name:path}"}:
        assert all(each["security"] == either("user") for each in paths[name].values())


# -- keys that come and go -----------------------------------------------------------------------------------


def rewrite(front: Front, folder: Path, roles: dict[str, str]) -> None:
    """Replace the table, as the launcher does on SIGHUP."""
    config = RuntimeConfig(api_keys=str(keys_file(folder, roles)))
    TenantsFile(Endpoints(front.ring.run_dir).tenants_file).write(read_tenants(config))


def test_a_key_that_is_gone_opens_nothing_and_what_runs_with_it_ends_well(tmp_path: Path) -> None:
    with tenants_front(tmp_path, answer) as (front, callers), caller(front, "carol") as carol:
        assert carol.get("/v1/models").status_code == 401
        stream = front.open_raw(
            "/v1/completions", headers=authorization("alice"), prompt="begin", stream=True
        )
        request = front.ring.wait_request()
        rewrite(front, tmp_path, {"carol": "user", "bob": "admin"})
        wait_until(lambda: carol.get("/v1/models").status_code == 200, 5.0, "the new key opens")
        refused(callers["alice"].get("/v1/models"), 401)
        assert callers["bob"].get("/stats").status_code == 200, "it has another role"
        front.ring.send(output(request, "b", finish=finish()))
        received = b""
        while b"[DONE]" not in received:
            received += stream.recv(65536)
        stream.close()
        assert not front.ring.aborts


def test_a_table_that_cannot_be_read_changes_nothing_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tenants_front(tmp_path, answer) as (front, callers):
        path = Endpoints(front.ring.run_dir).tenants_file
        path.write_bytes(b"[{")
        wait_until(lambda: "the last one stays in force" in caplog.text, 5.0, "it is said")
        for _ in range(10):
            assert callers["alice"].get("/v1/models").status_code == 200
        assert sum("the last one stays in force" in message for message in caplog.messages) == 1
        os.unlink(path)
        wait_until(lambda: "No such file" in caplog.text, 5.0, "another fault is said too")
        assert callers["alice"].get("/v1/models").status_code == 200
        rewrite(front, tmp_path, {"bob": "user"})
        wait_until(lambda: callers["alice"].get("/v1/models").status_code == 401, 5.0, "the next one counts")
