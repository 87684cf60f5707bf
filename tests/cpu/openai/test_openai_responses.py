"""The OpenAI endpoints over a fake ring: the shape of what they answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from carousel.client.core.result import Delta
from carousel.server.openai.chat_format import ChatCompletionFormat, ChatView
from carousel.server.openai.completion_format import CompletionFormat, CompletionView
from runtime.wire.format import pack_ids
from runtime.wire.messages import GenerateRequest, SequenceOutput
from tests.harness.http.http_front import Front, events, http_front
from tests.harness.ring.fake_ring import failure, finish, output, spell


def with_logprobs(request: GenerateRequest) -> list[SequenceOutput]:
    end = finish("stop", 2)
    return [
        SequenceOutput(
            request.handle,
            "in",
            pack_ids([67, 68]),
            np.array([-0.5, -1.0], np.float32).tobytes(),
            pack_ids([67, 7, 68, 8]) if request.sampling.logprobs else b"",
            np.array([-0.5, -2.0, -1.0, -3.0], np.float32).tobytes() if request.sampling.logprobs else b"",
            end,
        )
    ]


def answer(request: GenerateRequest) -> list[SequenceOutput]:
    """Return what the prompt or a parameter asks for; by default "abc"."""
    kind, _, rest = (request.text or "").partition(":")
    if kind == "refuse":
        code, _, status = rest.partition(":")
        return [failure(request, code, int(status), "prompt")]
    if kind == "shout":
        return [output(request, rest.upper(), finish=finish())]
    if kind == "begin":
        return [output(request, "a")]
    if request.sampling.logprobs is not None:
        return with_logprobs(request)
    if request.sampling.stop:
        return [output(request, "ab", finish=finish("stop", matched=request.sampling.stop[0]))]
    return spell("abc")(request)


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with http_front(tmp_path_factory.mktemp("run"), answer) as front:
        yield front


USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 3,
    "total_tokens": 8,
    "prompt_tokens_details": {"cached_tokens": 2},
}


def test_a_completion_has_the_shape_of_openai(front: Front) -> None:
    body = front.complete(model="fake").json()
    assert body["object"] == "text_completion"
    assert body["model"] == "fake"
    assert body["id"].startswith("cmpl-")
    assert body["usage"] == USAGE
    (choice,) = body["choices"]
    assert choice == {
        "index": 0,
        "text": "abc",
        "logprobs": None,
        "finish_reason": "stop",
        "matched_stop": None,
        "stop_reason": None,
        "prompt_logprobs": None,
        "token_ids": None,
        "prompt_token_ids": None,
    }


def test_a_chat_completion_has_the_shape_of_openai(front: Front) -> None:
    body = front.chat(model="fake").json()
    assert body["object"] == "chat.completion"
    assert body["usage"] == USAGE
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "abc", "refusal": None}
    assert choice["finish_reason"] == "stop"


def test_a_streamed_completion_adds_up_and_ends_with_done(front: Front) -> None:
    *chunks, last = events(front.complete(stream=True))
    assert last == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abc"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "stop"
    assert all("usage" not in chunk for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_a_streamed_chat_begins_with_the_role_and_ends_with_the_reason(front: Front) -> None:
    *chunks, last = events(front.chat(stream=True))
    assert last == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta["content"] for delta in deltas[1:-1]) == "abc"
    assert deltas[-1] == {}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert chunks[0]["object"] == "chat.completion.chunk"


@pytest.mark.parametrize("path", ["complete", "chat"])
def test_usage_comes_in_a_last_event_without_choices_when_asked_for(front: Front, path: str) -> None:
    response = getattr(front, path)(stream=True, stream_options={"include_usage": True})
    *chunks, usage, _ = events(response)
    assert usage["choices"] == []
    assert usage["usage"] == USAGE
    assert all(chunk["usage"] is None for chunk in chunks)


def test_several_prompts_give_as_many_choices_in_order(front: Front) -> None:
    body = front.complete(prompt=["shout:one", "shout:two"]).json()
    assert [(each["index"], each["text"]) for each in body["choices"]] == [(0, "ONE"), (1, "TWO")]
    assert body["usage"]["total_tokens"] == 16
    *chunks, last = events(front.complete(prompt=["shout:one", "shout:two"], stream=True))
    assert last == "[DONE]"
    texts = {chunk["choices"][0]["index"]: chunk["choices"][0]["text"] for chunk in chunks}
    assert texts == {0: "ONE", 1: "TWO"}


def test_one_refused_prompt_refuses_them_all(front: Front) -> None:
    for stream in (False, True):
        response = front.complete(prompt=["refuse:bad:400", "refuse:bad:400"], stream=stream)
        assert response.status_code == 400


def test_a_delta_without_text_logprobs_or_end_is_no_event() -> None:
    held = Delta("", [1], [])
    completion = CompletionFormat(CompletionView("m"), 1)
    assert b"".join(completion.events(0, held)) == b""
    assert b"".join(completion.events(0, Delta("a", [1], []))).count(b"data: ") == 1
    chat = ChatCompletionFormat(ChatView("m"))
    assert b"".join(chat.events(0, held)).count(b"data: ") == 1  # the role
    assert b"".join(chat.events(0, held)) == b""
    assert b"".join(chat.events(0, Delta("a", [1], [], "stop"))).count(b"data: ") == 2


def test_token_ids_are_prompts_too(front: Front) -> None:
    assert front.complete(prompt=[1, 2, 3]).status_code == 200
    assert front.complete(prompt=[[4], [5, 6]]).status_code == 200
    packed = [request.input_ids for request in front.ring.requests if request.input_ids is not None]
    assert packed == [pack_ids([1, 2, 3]), pack_ids([4]), pack_ids([5, 6])]


def test_logprobs_have_the_shape_of_their_endpoint(front: Front) -> None:
    columns = front.complete(logprobs=2).json()["choices"][0]["logprobs"]
    assert columns["token_logprobs"] == [-0.5, -1.0]
    assert columns["text_offset"] == [0, len(columns["tokens"][0])]
    assert list(columns["top_logprobs"][0].values()) == [-2.0, -0.5]
    assert columns["top_logprobs"][0][columns["tokens"][0]] == -0.5
    alone = front.complete(logprobs=0).json()["choices"][0]["logprobs"]
    assert alone["top_logprobs"][0] == {columns["tokens"][0]: -0.5}
    content = front.chat(logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == [-0.5, -1.0]
    assert bytes(content[0]["bytes"]).decode() == content[0]["token"] == columns["tokens"][0]
    assert [top["logprob"] for top in content[1]["top_logprobs"]] == [-1.0, -3.0]
    assert front.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    chunk = events(front.chat(logprobs=True, top_logprobs=2, stream=True))[1]
    assert chunk["choices"][0]["logprobs"]["content"] == content


def test_a_matched_stop_and_its_reason_are_told(front: Front) -> None:
    choice = front.complete(stop="END").json()["choices"][0]
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", "END")
    *_, chunk, _ = events(front.chat(stop=["END"], stream=True))
    assert chunk["choices"][0]["matched_stop"] == "END"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("context_length_exceeded", 400, "invalid_request_error"),
        ("overloaded", 503, "server_error"),
        ("lagged", 500, "server_error"),
    ],
)
def test_a_refusal_is_an_http_error_even_of_a_stream(
    front: Front, stream: bool, code: str, status: int, kind: str
) -> None:
    response = front.complete(prompt=f"refuse:{code}:{status}", stream=stream)
    assert response.status_code == status
    error = response.json()["error"]
    assert error["type"] == kind
    assert error["code"] == code
    assert error["param"] == (None if status == 503 else "prompt")
    assert ("retry-after" in response.headers) == (status == 503)


@pytest.mark.parametrize("code", ["lagged", "aborted"])
@pytest.mark.parametrize("index", [0, 1])
def test_an_error_inside_a_stream_is_an_event_behind_what_came_with_it_and_there_is_no_done(
    front: Front, code: str, index: int
) -> None:
    body = {"prompt": "begin", "stream": True, "n": 2}
    with front.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        assert '"text":"a"' in next(lines)
        request = front.ring.requests[-1]
        end = output(request, "", index=index, finish=finish("abort"))
        if code == "lagged":
            end = failure(request, code, 500, index=index)
        front.ring.send(output(request, "b"), end)
        text, error = [json.loads(line.removeprefix("data: ")) for line in lines if line]
        assert text["choices"][0]["text"] == "b"
        assert error["error"]["code"] == code


def test_the_model_list_and_one_model(front: Front) -> None:
    (card,) = front.http.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("fake", "model", 64)
    assert front.http.get("/v1/models/fake").json() == card
    for response in (
        front.http.get("/v1/models/other"),
        front.complete(model="other"),
        front.chat(model="other"),
    ):
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"


def test_requests_may_use_each_name_of_the_model_and_replies_use_the_first(tmp_path: Path) -> None:
    with http_front(tmp_path, spell("ab"), served_model_name="fake,gpt-x") as front:
        cards = front.http.get("/v1/models").json()["data"]
        assert [(card["id"], card["root"]) for card in cards] == [("fake", "fake"), ("gpt-x", "fake")]
        assert front.http.get("/v1/models/gpt-x").json() == cards[1]
        for name in ("fake", "gpt-x", None):
            assert front.complete(model=name).json()["model"] == "fake"
        assert front.complete(model="fake,gpt-x").status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nope", 404), ("POST", "/v1/completions/", 404), ("GET", "/v1/completions", 405)],
)
def test_unknown_routes_and_methods_answer_in_the_shape_of_openai(
    front: Front, method: str, path: str, status: int
) -> None:
    response = front.http.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert ("allow" in response.headers) == (status == 405)
    assert ("Allow" if status == 405 else "/openapi.json") in response.json()["error"]["message"]
