"""Rules in front of every endpoint: origins, names of requests in flight, hints, the log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from runtime.wire.messages import GenerateRequest, SequenceOutput
from tests.harness.http.http_front import Front, http_front
from tests.harness.ring.fake_ring import failure, finish, output, spell

ORIGIN = "https://page.example"


def answer(request: GenerateRequest) -> list[SequenceOutput]:
    if request.text == "begin":
        return [output(request, "a")] if request.stream else []
    if request.text == "refuse":
        return [failure(request, "overloaded", 503, retry_after_s=6.2)]
    return spell("abc")(request)


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    settings = {"cors_origins": f"{ORIGIN}, https://other.example", "api_key": "secret", "log_level": "info"}
    with http_front(tmp_path_factory.mktemp("run"), answer, **settings) as front:
        front.http.headers["Authorization"] = "Bearer secret"
        yield front


# -- origins -------------------------------------------------------------------------------------------------


def test_a_page_of_a_named_origin_may_ask_and_read(front: Front) -> None:
    asked = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    asked["Access-Control-Request-Headers"] = "authorization, content-type"
    with front.open_client() as browser:  # a browser's first question has no key
        response = browser.options("/v1/completions", headers=asked)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == ORIGIN
        assert "authorization" in response.headers["access-control-allow-headers"].lower()
        refused = browser.post("/v1/completions", json={"prompt": "x"}, headers={"Origin": ORIGIN})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == ORIGIN
    response = front.http.post("/v1/completions", json={"prompt": "x"}, headers={"Origin": ORIGIN})
    assert response.status_code == 200
    assert "X-Request-Id" in response.headers["access-control-expose-headers"]


def test_a_page_of_another_origin_may_not(front: Front) -> None:
    asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    assert front.http.options("/v1/completions", headers=asked).status_code == 400
    response = front.http.post("/v1/completions", json={"prompt": "x"}, headers=asked)
    assert "access-control-allow-origin" not in response.headers


# -- names of requests in flight -----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_rid_in_flight_is_refused_and_is_free_again_after_its_end(front: Front, stream: bool) -> None:
    headers = "Authorization: Bearer secret\r\n"
    seen = len(front.ring.requests)
    first = front.open_raw("/generate", headers=headers, text="begin", rid="mine", stream=stream)
    request = front.ring.wait_request(seen)
    refused = front.post("/generate", text="x", rid="mine")
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("duplicate_label", "rid")
    assert error["message"].startswith("rid: ")
    front.ring.send(output(request, "b", finish=finish()))
    data = b""
    while b'"stop"' not in data:
        data += first.recv(65536)
    first.close()
    for _ in range(3):
        assert front.post("/generate", text="x", rid="mine").status_code == 200


def test_names_within_a_list_have_to_differ(front: Front) -> None:
    assert front.post("/generate", text=["x", "y"], rid=["a", "a"]).json()["error"]["param"] == "rid"
    assert front.post("/generate", text=["x", "y"], rid=["a"]).json()["error"]["param"] == "rid"
    bodies = front.post("/generate", text=["x", "y"], rid="a").json()
    assert [each["meta_info"]["id"] for each in bodies] == ["a_0", "a_1"]


def test_several_requests_may_carry_one_x_request_id(front: Front) -> None:
    seen = len(front.ring.requests)
    headers = "Authorization: Bearer secret\r\nX-Request-Id: shared\r\n"
    first = front.open_raw("/v1/completions", headers=headers, prompt="begin")
    front.ring.wait_request(seen)
    response = front.http.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": "shared"})
    assert response.status_code == 200
    assert response.headers["x-request-id"] == "shared"
    labels = [request.label for request in front.ring.requests[seen:]]
    assert labels[0] == "shared"
    assert labels[1].startswith("shared-")
    first.close()


# -- hints and the log ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_for_want_of_room_says_when_to_come_again(front: Front, stream: bool) -> None:
    response = front.complete(prompt="refuse", stream=stream)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "7"


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("no_stop_trim", True, "include_stop_str_in_output"),
        ("max_new_tokens", 4, "max_tokens"),
        ("return_logprob", True, "logprobs"),
        ("functions", [{"name": "a"}], "tools"),
        ("stop_regex", "a+", "stop has texts"),
        ("suffix", "}", "into the prompt"),
        ("chat_template", "{{ a }}", "--chat-template"),
        ("documents", [{"text": "a"}], "chat_template_kwargs"),
        ("guided_decoding_backend", "outlines", "--grammar-backend"),
    ],
)
def test_a_refused_field_comes_with_what_to_use(front: Front, field: str, value: Any, words: str) -> None:
    error = front.complete(**{field: value}).json()["error"]
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")
    assert words in error["message"].partition("; ")[2]


def test_probes_are_not_logged(front: Front, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "uvicorn.access")
    for path in ("/live", "/ready", "/health", "/live?x=1"):
        front.http.get(path)
    assert front.complete().status_code == 200
    assert front.http.get("/live").status_code == 200
    lines = [record.getMessage() for record in caplog.records if record.name == "uvicorn.access"]
    assert len(lines) == 1
    assert "/v1/completions" in lines[0]
    assert json.dumps("x") not in lines[0]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/responses/input_tokens", "/tokenize"),
        ("/v1/responses/compact", "truncation"),
        ("/v1/audio/transcriptions", "text only"),
        ("/v1/classify", "/v1/score"),
        ("/v1/batches", "completions take up to"),
        ("/encode", "/v1/embeddings"),
        ("/release_memory_occupation", "stays in memory"),
        ("/open_session", "send the whole conversation"),
        ("/pause", "/pause_generation"),
        ("/hicache/storage-backend/clear", "/flush_cache"),
        ("/perf_metrics", "/metrics"),
        ("/v2/models/ensemble/generate", "below /v1"),
    ],
)
def test_a_path_of_others_that_is_not_built_says_what_to_use(front: Front, path: str, words: str) -> None:
    response = front.post(path, input="x")
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (404, "not_found")
    assert "is not built" in error["message"]
    assert words in error["message"]
    assert "is not built" not in front.post("/v1/responsess", input="x").text
