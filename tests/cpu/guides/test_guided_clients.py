"""Guides over HTTP, in every spelling, and by others' clients: openai, instructor, LangChain, LiteLLM."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from carousel import (
    ConfigError,
    ExecutorConfig,
    GenerationExecutor,
    GuidedDecodingConfig,
    GuidedDecodingParams,
    SamplingParams,
)
from tests.harness.ring.launched import Launched, launched

USER = {"role": "user", "content": "x"}
MESSAGES: Any = [USER]
SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": [1, 2]}},
    "required": ["n"],
    "additionalProperties": False,
}


TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<call>",
        "content": {"type": "json_schema", "json_schema": SCHEMA},
        "end": "</call>",
    },
}
OLDER_TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "e", "schema": {"const": 1}, "end": ";"}],
    "triggers": ["e"],
}
"""The letter is common, so that text of the demo model has some."""


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    lives: Literal[7, 9]


class Owner(BaseModel):
    name: Literal["Ada", "Bob"]
    pets: list[Pet] | None


NO_RULE = {"llguidance": "'x' not found", "xgrammar": 'Rule "x" is not defined'}


@pytest.fixture(scope="module", params=["llguidance", pytest.param("xgrammar", marks=pytest.mark.full)])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def url(backend: str, request: pytest.FixtureRequest) -> Iterator[str]:
    if backend == "llguidance":
        yield request.getfixturevalue("demo_launch").url
        return
    arguments = ("--dtype=float32", "--cpu-threads=1", "--served-model-name=demo")
    with launched(*arguments, f"--grammar-backend={backend}") as launch:
        yield launch.url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60.0) as client:
        yield client


def is_object(text: str) -> bool:
    """The demo model may never end one; then it is the beginning of one."""
    return text.startswith("{")


def is_schema(text: str) -> bool:
    return json.loads(text) in ({"n": 1}, {"n": 2})


def is_tagged(text: str) -> bool:
    call = re.fullmatch("<call>(.*)</call>", text, re.DOTALL)
    return call is not None and is_schema(call[1])


def is_text_with_tags(text: str) -> bool:
    return re.fullmatch(r"[^e]*(e\s*1;[^e]*)+(e\s*1?)?", text) is not None


LARK = {"guided_grammar": 'start: "a" | "b"'}
SPELLINGS: list[tuple[dict[str, Any], Any]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}}, is_schema),
    ({"response_format": {"type": "json_object"}}, is_object),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, is_schema),
    ({"structured_outputs": {"json": SCHEMA}}, is_schema),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, is_schema),
    ({"structured_outputs": {"json_object": True}}, is_object),
    ({"structured_outputs": {"regex": "[a-c]{3}"}}, re.compile("[a-c]{3}").fullmatch),
    ({"structured_outputs": {"choice": ["one", "two"]}}, lambda text: text in ("one", "two")),
    ({"structured_outputs": {"grammar": 'root ::= "a" | "b"'}}, lambda text: text in "ab"),
    ({"guided_json": SCHEMA}, is_schema),
    ({"guided_regex": "[a-c]{3}"}, re.compile("[a-c]{3}").fullmatch),
    ({"guided_choice": ["one", "two"]}, lambda text: text in ("one", "two")),
    (LARK, lambda text: text in "ab"),
    ({"regex": "[a-c]{3}"}, re.compile("[a-c]{3}").fullmatch),
    ({"ebnf": 'root ::= "a" | "b"'}, lambda text: text in "ab"),
    ({"json_schema": json.dumps(SCHEMA)}, is_schema),
    ({"response_format": TAG}, is_tagged),
    ({"response_format": OLDER_TAG}, is_text_with_tags),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, is_tagged),
    ({"structural_tag": json.dumps(TAG)}, is_tagged),
]


@pytest.mark.parametrize(
    ("fields", "fits"), SPELLINGS, ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else ""
)
def test_each_spelling_is_kept_in_chat_and_completions(
    url: str, backend: str, fields: dict[str, Any], fits: Any
) -> None:
    common = {"max_tokens": 400, "seed": 2, **fields}
    chat = httpx.post(f"{url}/v1/chat/completions", json={"messages": [USER], **common}, timeout=60.0)
    if backend == "xgrammar" and fields == LARK:
        assert chat.status_code == 400
        assert "--grammar-backend xgrammar does not take it" in chat.json()["error"]["message"]
        return
    assert chat.status_code == 200, chat.text
    assert fits in (is_object, is_text_with_tags) or chat.json()["choices"][0]["finish_reason"] == "stop"
    assert fits(chat.json()["choices"][0]["message"]["content"])
    plain = httpx.post(f"{url}/v1/completions", json={"prompt": "x", **common}, timeout=60.0)
    assert fits(plain.json()["choices"][0]["text"])


@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({"json_schema": json.dumps(SCHEMA)}, is_schema),
        ({"regex": "a|b"}, "ab".__contains__),
        ({"ebnf": 'root ::= "a"'}, "a".__eq__),
        ({"structural_tag": json.dumps(TAG)}, is_tagged),
    ],
)
def test_each_spelling_of_sglang_is_kept_by_generate(url: str, fields: dict[str, Any], fits: Any) -> None:
    body = {"text": "x", "sampling_params": {"max_new_tokens": 200, "sampling_seed": 2, **fields}}
    answer = httpx.post(f"{url}/generate", json=body, timeout=60.0)
    assert answer.status_code == 200, answer.text
    assert fits(answer.json()["text"])


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_with_a_guide_is_an_http_error_by_the_fields_name(
    url: str, backend: str, stream: bool
) -> None:
    wrong = {
        "type": "json_schema",
        "json_schema": {"name": "s", "schema": {"properties": {"a": {"not": {}}}}},
    }
    for fields, param, words in (
        ({"response_format": wrong}, "response_format", "/properties/a/not: not is not supported"),
        ({"guided_regex": "(?=a)"}, "guided_regex", "look-ahead"),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs", NO_RULE[backend]),
        (
            {"response_format": {"type": "json_object"}, "regex": "a"},
            "regex",
            "response_format is given, too",
        ),
        ({"guided_json": {"type": "x" * 300_000}}, "guided_json", "more than 131072"),
    ):
        body = {"messages": [USER], "stream": stream, **fields}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60.0)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == param
        assert words in error["message"]


def test_openai_parses_what_comes(client: openai.OpenAI) -> None:
    for seed in range(4):
        answer = client.chat.completions.parse(
            model="demo",
            messages=[{"role": "user", "content": "x"}],
            response_format=Owner,
            max_tokens=1000,
            seed=seed,
        )
        assert isinstance(answer.choices[0].message.parsed, Owner)


def test_openai_parses_a_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="demo", messages=MESSAGES, response_format=Pet, max_tokens=400, seed=1
    ) as stream:
        for _ in stream:
            pass
        parsed = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(parsed, Pet)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_instructor_gets_its_model(client: openai.OpenAI) -> None:
    import instructor

    wrapped = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    pet = wrapped.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "x"}],
        response_model=Pet,
        max_tokens=1000,
        seed=2,
        max_retries=0,
    )
    assert isinstance(pet, Pet)


def test_langchain_gets_its_model(url: str) -> None:
    from langchain_openai import ChatOpenAI

    limits: dict[str, Any] = {"max_tokens": 1000, "seed": 2, "max_retries": 0}
    chat = ChatOpenAI(model="demo", base_url=f"{url}/v1", api_key="none", **limits)
    pet = chat.with_structured_output(Pet, method="json_schema").invoke("x")
    assert isinstance(pet, Pet)


@pytest.mark.filterwarnings("ignore:Item .* on TypedDict class:UserWarning")  # of its own types
@pytest.mark.parametrize("stream", [False, True])
def test_litellm_gets_its_model(url: str, litellm: Any, stream: bool) -> None:
    call: dict[str, Any] = {
        "model": "openai/demo",
        "messages": [USER],
        "api_base": f"{url}/v1",
        "api_key": "none",
        "response_format": Pet,
        "max_tokens": 1000,
        "seed": 2,
        "num_retries": 0,
        "stream": stream,
    }
    answer: Any = litellm.completion(**call)
    if stream:
        answer = litellm.stream_chunk_builder(list(answer))
    assert isinstance(Pet.model_validate_json(answer.choices[0].message.content), Pet)


def test_the_executor_keeps_guides_in_tensorrt_llms_words(demo_launch: Launched) -> None:
    kinds = GuidedDecodingParams.GuideType
    with GenerationExecutor.create(run_dir=demo_launch.run_dir) as executor:
        for params, fits in (
            (GuidedDecodingParams(kinds.JSON), lambda text: text.startswith("{")),
            (GuidedDecodingParams(kinds.JSON_SCHEMA, json.dumps(SCHEMA)), is_schema),
            (GuidedDecodingParams(kinds.REGEX, "[ab]{3}"), re.compile("[ab]{3}").fullmatch),
            (GuidedDecodingParams(kinds.EBNF_GRAMMAR, 'root ::= "a" | "b"'), lambda text: text in "ab"),
            # As its LLM API has them.
            (GuidedDecodingParams(json=SCHEMA), is_schema),
            (GuidedDecodingParams(regex="[ab]{3}"), re.compile("[ab]{3}").fullmatch),
            (GuidedDecodingParams(choice=["red", "blue"]), lambda text: text in ("red", "blue")),
            (GuidedDecodingParams(json_object=True), lambda text: text.startswith("{")),
        ):
            sampling = SamplingParams(max_tokens=300, seed=1)
            result = executor.generate_async([5, 6], sampling, guided_decoding_params=params)
            assert fits(result.result().outputs[0].text)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (GuidedDecodingConfig("OUTLINES"), "LLGUIDANCE and XGRAMMAR are what is built"),
        (GuidedDecodingConfig(encoded_vocab=["a"]), "encoded_vocab"),
        ("llguidance", "a carousel.GuidedDecodingConfig"),
    ],
)
def test_a_config_that_cannot_be_had_is_refused(config: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ExecutorConfig(guided_decoding_config=config).asked()
