"""Adapters over HTTP: as a model's name, as lora_path of /generate, and in /v1/models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from runtime.wire.messages import GenerateRequest, SequenceOutput
from runtime.wire.plan import AdapterRef
from tests.harness.http.http_front import Front, http_front
from tests.harness.ring.fake_ring import failure, spell


def answer(request: GenerateRequest) -> list[SequenceOutput]:
    if request.text == "fail":
        return [failure(request, "invalid_adapter", 400, "lora_request")]
    return spell("ok")(request)


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    run_dir = tmp_path_factory.mktemp("run")
    settings = {"enable_lora": True, "lora_modules": "sql=/adapters/sql,chat=/adapters/chat"}
    with http_front(run_dir, answer, **settings) as front:
        yield front


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with http_front(tmp_path_factory.mktemp("run"), answer) as front:
        yield front


MESSAGES = [{"role": "user", "content": "x"}]
PATHS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "x"}),
    ("/v1/chat/completions", {"messages": MESSAGES}),
]


def adapters(front: Front, number: int = 1) -> list[AdapterRef | None]:
    return [request.adapter for request in front.ring.requests[-number:]]


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_an_adapter_is_asked_for_by_its_name_as_the_model(
    front: Front, path: str, body: dict[str, Any]
) -> None:
    base = front.config.model_names[0]
    for name in ("sql", f"{base}:sql"):
        reply = front.post(path, **body, model=name)
        assert reply.status_code == 200
        assert reply.json()["model"] == "sql"
        assert adapters(front) == [AdapterRef("sql", 1, "", "")]
    reply = front.post(path, **body, model=base)
    assert reply.json()["model"] == base
    assert adapters(front) == [None]


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_an_unknown_model_is_refused(front: Front, plain: Front, path: str, body: dict[str, Any]) -> None:
    for server, name in ((front, "none"), (front, "other:sql"), (plain, "sql")):
        reply = server.post(path, **body, model=name)
        assert reply.status_code == 404
        assert reply.json()["error"]["code"] == "model_not_found"


def test_the_tokenizer_is_that_of_the_model(front: Front) -> None:
    assert front.post("/tokenize", model="sql", prompt="x").status_code == 200
    assert front.post("/tokenize", model="none", prompt="x").status_code == 404


def test_generate_has_lora_path_one_or_one_for_each_prompt(front: Front) -> None:
    assert front.post("/generate", text="x", lora_path="sql").status_code == 200
    assert adapters(front) == [AdapterRef("sql", 1, "", "")]
    reply = front.post("/generate", text=["x", "y", "z"], lora_path=["chat", None, ""])
    assert reply.status_code == 200
    by_text = {request.text: request.adapter for request in front.ring.requests[-3:]}
    assert by_text == {"x": AdapterRef("chat", 1, "", ""), "y": None, "z": None}


@pytest.mark.parametrize(
    ("lora_path", "text", "code"),
    [
        ("none", "x", "unknown_adapter"),
        (["sql"], ["x", "y"], "invalid_value"),
        ("sql", "fail", "invalid_adapter"),
        ("x" * 300, "x", "invalid_value"),
    ],
)
def test_what_cannot_be_served_names_the_field(front: Front, lora_path: Any, text: Any, code: str) -> None:
    reply = front.post("/generate", text=text, lora_path=lora_path)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["code"], error["param"]) == (code, "lora_path")


def test_an_adapter_where_none_are_served_is_refused_by_name(plain: Front) -> None:
    reply = plain.post("/generate", text="x", lora_path="sql")
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["code"], error["param"]) == ("lora_not_enabled", "lora_path")
    assert "--enable-lora" in error["message"]


def test_a_refusal_names_the_model(front: Front) -> None:
    error = front.post("/v1/completions", prompt="fail", model="sql").json()["error"]
    assert (error["code"], error["param"]) == ("invalid_adapter", "model")


def test_adapters_stand_in_the_list_of_models_with_their_parent(front: Front, plain: Front) -> None:
    base = front.config.model_names[0]
    cards = front.http.get("/v1/models").json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [(base, None), ("sql", base), ("chat", base)]
    assert front.http.get("/v1/models/sql").json()["parent"] == base
    assert front.http.get("/v1/models/none").status_code == 404
    assert [card["parent"] for card in plain.http.get("/v1/models").json()["data"]] == [None]
    assert plain.http.get("/v1/models/sql").status_code == 404
