"""Tenants that the HTTP server keeps apart: whose a request is, its label, its cached prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from runtime.wire.messages import ControlRequest, GenerateRequest, SequenceOutput
from tests.cpu.http.test_http_control import INFO
from tests.harness.http.http_front import Front, http_front
from tests.harness.http.http_tenants import authorization, tenants_front
from tests.harness.ring.fake_ring import EPOCH, failure, finish, output, spell

COMMANDS = ("pause_generation", "continue_generation", "start_profile", "stop_profile", "flush_cache")
QUESTIONS = {
    "/stats/iterations": "iteration_stats",
    "/stats/requests": "request_stats",
    "/server_info": "server_info",
}


def answer(request: GenerateRequest) -> list[SequenceOutput]:
    if request.text == "begin":
        return []
    if request.text == "limited":
        return [failure(request, "rate_limit_exceeded", 429, retry_after_s=2.5)]
    return spell("abc")(request)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Front, dict[str, httpx.Client]]]:
    with tenants_front(tmp_path_factory.mktemp("keys"), answer) as (front, callers):
        front.ring.info = INFO
        yield front, callers


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": ["x", "y"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/generate", {"text": "x"}),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_carries_the_name_of_who_asked(
    served: tuple[Front, dict[str, httpx.Client]], path: str, prompt: dict[str, object], stream: bool
) -> None:
    """The tokenizer keeps the prefixes of different tenants apart by it, whatever salt they name."""
    front, callers = served
    for name in ("alice", "bob", "root"):
        seen = len(front.ring.requests)
        body = {**prompt, "stream": stream, "cache_salt": "salt"}
        assert callers[name].post(path, json=body).status_code == 200
        made = front.ring.requests[seen:]
        assert made
        assert {(request.tenant, request.cache_salt) for request in made} == {(name, "salt")}


def test_a_command_carries_the_name_of_who_gave_it(served: tuple[Front, dict[str, httpx.Client]]) -> None:
    front, callers = served
    for command in COMMANDS:
        assert callers["root"].post(f"/{command}").status_code == 200
    for path in QUESTIONS:
        assert callers["root"].get(path).status_code == 200
    asked = [message for _, message in front.ring.arrivals if isinstance(message, ControlRequest)]
    assert {(message.op, message.tenant) for message in asked} == {
        (op, "root") for op in (*COMMANDS, *QUESTIONS.values())
    }


def test_what_the_server_asks_for_itself_is_the_owners(tmp_path: Path) -> None:
    with tenants_front(tmp_path, answer) as (front, callers):
        front.ring.info = INFO
        assert callers["mona"].get("/metrics").status_code == 200
        assert callers["alice"].get("/health_generate").status_code == 200
        assert [request.tenant for request in front.ring.requests] == [""]
        asked = [message for _, message in front.ring.arrivals if isinstance(message, ControlRequest)]
        assert [(message.op, message.tenant) for message in asked] == [("server_info", "")]


def test_the_only_key_is_the_owners(tmp_path: Path) -> None:
    """Its prefixes are those of the client library in the run directory, as they have always been."""
    with http_front(tmp_path, answer, api_key="secret") as front:
        headers = {"Authorization": "Bearer secret"}
        assert front.http.post("/generate", json={"text": "x"}, headers=headers).status_code == 200
        assert front.ring.requests[-1].tenant == ""


def test_each_of_several_keys_is_a_tenant(tmp_path: Path) -> None:
    with http_front(tmp_path, answer, api_key="a, b") as front:
        for key, status in (("a", 200), ("b", 200), ("a,b", 401), ("c", 401)):
            headers = {"Authorization": f"Bearer {key}"}
            assert front.http.post("/generate", json={"text": "x"}, headers=headers).status_code == status
        first, second = (request.tenant for request in front.ring.requests)
        assert "" != first != second != ""


def test_a_request_that_is_made_again_is_still_its_callers(tmp_path: Path) -> None:
    with tenants_front(tmp_path, answer) as (front, _):
        stream = front.open_raw("/generate", headers=authorization("bob"), text="begin", stream=True)
        front.ring.wait_request()
        front.ring.set_state("tokenizer", "loading")
        for role in ("scheduler", "worker"):
            front.ring.status.write(role, front.ring.status.read(role)._replace(epoch=EPOCH + 1))
        front.ring.set_state("tokenizer", "ready")
        again = front.ring.wait_request(1)
        assert again.tenant == "bob"
        assert again.handle != front.ring.requests[0].handle
        front.ring.send(output(again, "b", finish=finish()))
        received = b""
        while b"[DONE]" not in received:
            received += stream.recv(65536)
        stream.close()


@pytest.mark.parametrize("stream", [False, True])
def test_nobody_learns_which_labels_others_use(
    served: tuple[Front, dict[str, httpx.Client]], stream: bool
) -> None:
    """One caller's `rid` or X-Request-Id may be another's, in flight, and each gets its own answer."""
    front, callers = served
    seen = len(front.ring.requests)
    held = front.open_raw(
        "/generate",
        headers=authorization("alice") + "X-Request-Id: id\r\n",
        text="begin",
        rid="mine",
        stream=stream,
    )
    request = front.ring.wait_request(seen)
    own = callers["alice"].post("/generate", json={"text": "x", "rid": "mine"})
    assert (own.status_code, own.json()["error"]["code"]) == (400, "duplicate_label")
    for rid in ("mine", "other"):
        response = callers["bob"].post(
            "/generate", json={"text": "x", "rid": rid, "stream": stream}, headers={"X-Request-Id": "id"}
        )
        assert response.status_code == 200
        assert response.headers["x-request-id"] == "id"
        assert f'"id":"{rid}"' in response.text
    front.ring.send(output(request, "b", finish=finish()))
    received = b""
    while b"completion_tokens" not in received:
        received += held.recv(65536)
    held.close()
    assert {each.label for each in front.ring.requests[seen:]} == {"mine", "other"}


@pytest.mark.parametrize("stream", [False, True])
def test_who_has_its_limit_is_told_when_to_come_again(
    served: tuple[Front, dict[str, httpx.Client]], stream: bool
) -> None:
    _, callers = served
    response = callers["alice"].post("/generate", json={"text": "limited", "stream": stream})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3"
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
