"""/v1/messages over HTTP, with Anthropic's client and a fake ring that says what the test has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from runtime.wire.messages import GenerateRequest, SequenceOutput
from tests.harness.http.http_front import Front, http_front
from tests.harness.http.http_tenants import key_of, tenants_front
from tests.harness.http.scripted_model import CALL, NOW, Script, scripted_front
from tests.harness.ring.fake_ring import PROMPT_TOKENS, failure, finish, output, spell
from tests.harness.ring.launched import wait_until

TOOLS: list[Any] = [
    {
        "name": "weather",
        "description": "Weather of a city",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
    {"name": "now", "input_schema": {"type": "object"}, "type": "custom"},
]
USER: Any = {"role": "user", "content": "What is the weather?"}
ASKED: dict[str, Any] = {"model": "fake", "max_tokens": 400, "messages": [USER]}
TEXT = "<think>\nHm.\n</think>\n\nLet me see.\n"


@pytest.fixture(scope="module")
def script() -> Script:
    return Script()


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory, script: Script) -> Iterator[Front]:
    with scripted_front(tmp_path_factory.mktemp("run"), script) as front:
        yield front


@pytest.fixture
def says(script: Script, front: Front) -> Iterator[Any]:
    """Set what the model says."""
    yield script.say
    script.texts = [""]


@pytest.fixture
def client(front: Front) -> Iterator[anthropic.Anthropic]:
    with client_of(front) as client:
        yield client


def client_of(front: Front, key: str = "none") -> anthropic.Anthropic:
    url = f"http://127.0.0.1:{front.port}"
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, timeout=30.0)


def content_of(message: anthropic.types.Message) -> list[Any]:
    """The blocks of a message, without the ids of calls."""
    blocks = [block.to_dict() for block in message.content]
    return [{name: value for name, value in block.items() if name != "id"} for block in blocks]


def turns_of(request: GenerateRequest) -> list[tuple[str, str]]:
    return [(turn.role, turn.content) for turn in request.messages or ()]


def streamed(client: anthropic.Anthropic, **body: Any) -> anthropic.types.Message:
    with client.messages.stream(**{**ASKED, **body}) as stream:
        return stream.get_final_message()


def events(response: httpx.Response) -> list[Any]:
    """The data of each event, whose type is its name."""
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def refused(front: Front, path: str = "/v1/messages", status: int = 400, **body: Any) -> str:
    """The message of a refusal."""
    response = front.post(path, **{**ASKED, **body})
    assert response.status_code == status, response.text
    answer = response.json()
    assert set(answer) == {"type", "error", "request_id"}
    assert answer["type"] == "error"
    assert answer["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    assert answer["error"]["type"] == {
        400: "invalid_request_error",
        404: "not_found_error",
        503: "overloaded_error",
    }.get(status)
    message: str = answer["error"]["message"]
    return message


def test_a_text(client: anthropic.Anthropic, says: Any) -> None:
    says("Hello")
    message = client.messages.create(**ASKED)
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", "fake")
    assert content_of(message) == [{"type": "text", "text": "Hello"}]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message._request_id
    usage = message.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (PROMPT_TOKENS - 2, 2)
    assert (usage.output_tokens, usage.cache_creation_input_tokens) == (5, 0)
    again = streamed(client)
    assert content_of(again) == content_of(message)
    assert again.usage.to_dict() == usage.to_dict()
    assert again.stop_reason == "end_turn"


def test_an_answer_without_text_has_no_blocks(client: anthropic.Anthropic, says: Any) -> None:
    says("")
    assert client.messages.create(**ASKED).content == []
    assert streamed(client).content == []


def test_thinking_text_and_calls_streamed_and_whole(client: anthropic.Anthropic, says: Any) -> None:
    says(f"{TEXT}{CALL}\n{NOW}")
    message = client.messages.create(**ASKED, tools=TOOLS)
    assert message.stop_reason == "tool_use"
    assert content_of(message) == [
        {"type": "thinking", "thinking": "Hm.", "signature": "unsigned"},
        {"type": "text", "text": "Let me see.\n"},
        {"type": "tool_use", "name": "weather", "input": {"city": "Köln", "days": 2}},
        {"type": "tool_use", "name": "now", "input": {}},
    ]
    again = streamed(client, tools=TOOLS)
    assert content_of(again) == content_of(message)
    assert (again.stop_reason, again.usage.output_tokens) == ("tool_use", message.usage.output_tokens)
    for usage in (message.usage, again.usage):
        # The fake ring's tokens are characters, which are not those of the tokenizer.
        assert usage.output_tokens_details is not None
        assert 0 < usage.output_tokens_details.thinking_tokens <= usage.output_tokens


def test_the_events_of_a_stream(front: Front, says: Any) -> None:
    says(f"{TEXT}{CALL}")
    first, *blocks, delta, stop = events(front.post("/v1/messages", **ASKED, tools=TOOLS, stream=True))
    assert first["type"] == "message_start"
    assert first["message"]["content"] == []
    assert (first["message"]["stop_reason"], first["message"]["stop_sequence"]) == (None, None)
    kinds = ["thinking", "text", "tool_use"]
    for index, kind in enumerate(kinds):
        own = [event for event in blocks if event["index"] == index]
        begin, *middle, end = own
        assert (begin["type"], end["type"]) == ("content_block_start", "content_block_stop")
        assert begin["content_block"]["type"] == kind
        assert {event["type"] for event in middle} == {"content_block_delta"}
        deltas = [event["delta"]["type"] for event in middle]
        if kind == "thinking":
            assert deltas.pop() == "signature_delta"
        assert set(deltas) == {
            {"text": "text_delta", "tool_use": "input_json_delta"}.get(kind, "thinking_delta")
        }
    assert [event["index"] for event in blocks] == sorted(event["index"] for event in blocks)
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert delta["usage"]["cache_read_input_tokens"] == 2
    assert stop == {"type": "message_stop"}


def test_a_call_that_the_limit_cut_is_not_said_to_be_one(client: anthropic.Anthropic, says: Any) -> None:
    says(CALL[:70], reason="length")
    message = client.messages.create(**{**ASKED, "max_tokens": 70}, tools=TOOLS)
    assert message.stop_reason == "max_tokens"
    assert content_of(message) == [{"type": "tool_use", "name": "weather", "input": {}}]
    assert streamed(client, tools=TOOLS, max_tokens=70).stop_reason == "max_tokens"
    assert client.messages.create(**ASKED, tools=TOOLS).stop_reason == "model_context_window_exceeded"


def test_the_stop_sequence_that_was_found_is_named(tmp_path: Path) -> None:
    def answer(request: GenerateRequest) -> list[SequenceOutput]:
        assert request.sampling.stop == ("END", "\n\n")
        return [output(request, "ab", finish=finish("stop", matched="END"))]

    with http_front(tmp_path, answer) as front, client_of(front) as client:
        for message in (
            client.messages.create(**ASKED, stop_sequences=["END", "\n\n"]),
            streamed(client, stop_sequences=["END", "\n\n"]),
        ):
            assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")
            assert content_of(message) == [{"type": "text", "text": "ab"}]


def test_reasoning_may_be_left_out_of_the_answer(client: anthropic.Anthropic, says: Any) -> None:
    says(TEXT)
    thinking: Any = {"type": "adaptive", "display": "omitted"}
    for message in (client.messages.create(**ASKED, thinking=thinking), streamed(client, thinking=thinking)):
        assert [block.type for block in message.content] == ["text"]


def test_a_round_trip_of_tools(client: anthropic.Anthropic, says: Any, script: Script) -> None:
    says(f"{TEXT}{CALL}", "It rains.")
    first = client.messages.create(**ASKED, tools=TOOLS)
    call = first.content[-1]
    assert call.type == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "Rain"}]}
    messages = [USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(**{**ASKED, "messages": messages}, tools=TOOLS)
    assert content_of(second) == [{"type": "text", "text": "It rains."}]
    assert turns_of(script.requests[-1]) == [
        ("user", USER["content"]),
        ("assistant", "Let me see.\n"),
        ("tool", "Rain"),
    ]


def test_tools_reach_the_template_in_openais_form(front: Front, says: Any, script: Script) -> None:
    says(CALL)
    assert front.post("/v1/messages", **ASKED, tools=TOOLS).status_code == 200
    first, second = json.loads(script.requests[-1].tools)
    assert first == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city",
            "parameters": TOOLS[0]["input_schema"],
        },
    }
    assert second["function"] == {"name": "now", "parameters": {"type": "object"}}
    choice = {"type": "none"}
    answer = front.post("/v1/messages", **ASKED, tools=TOOLS, tool_choice=choice).json()
    assert script.requests[-1].tools == b""
    assert answer["content"] == [{"type": "text", "text": CALL}]


def test_at_most_one_call_where_parallel_ones_are_not_wanted(client: anthropic.Anthropic, says: Any) -> None:
    says(f"{CALL}\n{NOW}")
    choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
    for message in (
        client.messages.create(**ASKED, tools=TOOLS, tool_choice=choice),
        streamed(client, tools=TOOLS, tool_choice=choice),
    ):
        assert [block.type for block in message.content] == ["tool_use"]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_calls_that_are_asked_for_are_held(
    front: Front, says: Any, script: Script, choice: dict[str, str]
) -> None:
    says(CALL)
    answer = front.post("/v1/messages", **ASKED, tools=TOOLS, tool_choice=choice).json()
    assert [block["type"] for block in answer["content"]] == ["tool_use"]
    assert script.requests[-1].guide is not None


def test_the_budget_of_reasoning_and_a_schema_are_one_guide(front: Front, says: Any, script: Script) -> None:
    says(TEXT)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    body = {
        "thinking": {"type": "enabled", "budget_tokens": 9},
        "output_config": {"format": {"type": "json_schema", "schema": schema}},
    }
    assert front.post("/v1/messages", **ASKED, **body).status_code == 200
    guide = script.requests[-1].guide
    assert guide is not None
    assert '"most":{"count":9,' in guide.text
    assert "integer" in guide.text


def test_an_answer_that_was_begun_goes_on(front: Front, says: Any, script: Script) -> None:
    says("4")
    messages = [USER, {"role": "assistant", "content": "It is "}]
    answer = front.post("/v1/messages", **{**ASKED, "messages": messages}).json()
    assert answer["content"] == [{"type": "text", "text": "4"}]
    assert script.requests[-1].continue_final_message


def test_fields_that_are_taken(client: anthropic.Anthropic, says: Any, script: Script) -> None:
    says("a")
    mark: Any = {"type": "ephemeral", "ttl": "1h"}
    response = client.messages.with_raw_response.create(
        model="fake",
        max_tokens=9,
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cch=1;", "cache_control": mark},
            {"type": "text", "text": "Be brief.", "cache_control": mark},
        ],
        messages=[{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": mark}]}],
        metadata={"user_id": "somebody"},
        service_tier="auto",
        speed="standard",
        cache_control=mark,
        tools=[TOOLS[1] | {"cache_control": mark}],
        extra_headers={"anthropic-beta": "a,b"},
        extra_body={
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 7,
            "seed": 3,
            "priority": 2,
            "context_management": {"edits": []},
        },
    )
    assert "x-carousel-ignored" not in response.headers
    request = script.requests[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 7, 3)
    assert request.priority == 2
    assert turns_of(request) == [("system", "Be brief."), ("user", "x")]


def test_a_field_that_nobody_knows_is_named_in_the_answer(front: Front, says: Any) -> None:
    says("a")
    response = front.post("/v1/messages", **ASKED, wonderful=True)
    assert (response.status_code, response.headers["x-carousel-ignored"]) == (200, "wonderful")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"stop": ["x"]}, "it is called stop_sequences here"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"n": 2}, "n is not supported"),
        ({"temperature": -1}, "temperature"),
        ({"container": "c"}, "container is not supported"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers is not supported"),
        ({"inference_geo": "eu"}, "inference_geo is not supported"),
        ({"speed": "fast"}, "speed is not supported"),
        ({"diagnostics": {"previous_message_id": "msg_1"}}, "diagnostics is not supported"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"max_token": 3}, "did you mean max_tokens?"),
        ({"cache_control": {"type": "persistent"}}, "cache_control.type"),
        ({"system": [{"type": "image", "source": {}}]}, "system[0].type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens is needed"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 9}}, "thinking.budget_tokens is needed"),
        ({"thinking": {"type": "enabled", "budget_tokens": 400}}, "less than max_tokens"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"output_config": {"task_budget": {}}}, "output_config.task_budget"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema is missing"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: there are no tools"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name is needed"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}},
            "tool_choice.name: x is not one of tools",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema is missing"),
        ({"tools": [{**TOOLS[0], "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [TOOLS[1], TOOLS[1]]}, "tools[1].name: now is there twice"),
        ({"tools": [{"name": "ä", "input_schema": {}}]}, "tools[0].name"),
        (
            {"tools": [{"name": "x", "input_schema": {}, "parameters": {"type": "object"}}]},
            "tools[0].parameters: the tool has an input_schema",
        ),
        ({"tools": [{"name": "x", "input_schema": {"type": "string"}}]}, "tools[0].input_schema.type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].type: this server takes text only",
        ),
        (
            {"messages": [{"role": "user", "content": [{"source": {}, "type": "image"}]}]},
            "messages[0].content[0].source is not supported by this server; this server takes text only",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text is missing",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "citations": [{}]}]}]},
            "messages[0].content[0].citations",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": [{"type": "redacted_thinking"}]}]},
            "messages[1].content[0].type",
        ),
    ],
)
def test_a_wrong_request_is_told_the_place(front: Front, body: dict[str, Any], words: str) -> None:
    assert words in refused(front, **body)


def test_errors_have_anthropics_classes(front: Front, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="nobody"):
        client.messages.create(**{**ASKED, "model": "nobody"})
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(**{**ASKED, "max_tokens": -1})
    response = front.http.get("/v1/messages")
    assert (response.status_code, response.json()["error"]["type"]) == (405, "invalid_request_error")
    response = front.post("/v1/messages/batches", requests=[])
    assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")
    assert "is not built: send the requests themselves to /v1/messages" in response.text
    response = front.http.post(
        "/v1/messages", content=b"x" * ((8 << 20) + 1), headers={"content-type": "application/json"}
    )
    assert (response.status_code, response.json()["error"]["type"]) == (413, "request_too_large")


def test_a_model_that_reasons_not_takes_no_budget(tmp_path: Path) -> None:
    with http_front(tmp_path, spell("ab")) as front, client_of(front) as client:
        body: Any = {"max_tokens": 20, "thinking": {"type": "enabled", "budget_tokens": 9}}
        assert "thinking.budget_tokens: this server tells no reasoning apart" in refused(front, **body)
        assert "tools: this server reads no tool calls" in refused(front, tools=TOOLS)
        for kind in ("adaptive", "disabled"):
            thinking: Any = {"type": kind}
            message = streamed(client, max_tokens=20, thinking=thinking)
            assert content_of(message) == [{"type": "text", "text": "ab"}]


def test_a_failure_after_the_first_event_is_an_event(tmp_path: Path) -> None:
    def answer(request: GenerateRequest) -> list[SequenceOutput]:
        return [output(request, "a", num_prompt_tokens=PROMPT_TOKENS), failure(request, "worker_failed", 503)]

    with http_front(tmp_path, answer) as front, client_of(front) as client:
        found = events(front.post("/v1/messages", **ASKED, stream=True))
        assert found[0]["message"]["usage"]["input_tokens"] == PROMPT_TOKENS
        assert found[-1]["type"] == "error"
        assert found[-1]["error"] == {"type": "overloaded_error", "message": "refused: worker_failed"}
        with pytest.raises(anthropic.APIStatusError, match="worker_failed"):
            streamed(client)
        assert "worker_failed" in refused(front, status=503)


def test_a_failure_before_the_first_event_has_its_status(tmp_path: Path) -> None:
    def answer(request: GenerateRequest) -> list[SequenceOutput]:
        return [failure(request, "queue_full", 503, retry_after_s=7.0)]

    with http_front(tmp_path, answer) as front, client_of(front) as client:
        with pytest.raises(anthropic.InternalServerError) as caught:
            streamed(client)
        assert caught.value.status_code == 503
        assert caught.value.response.headers["retry-after"] == "7"


def test_tenants_have_their_keys_and_shares(tmp_path: Path) -> None:
    def answer(request: GenerateRequest) -> list[SequenceOutput]:
        return [] if turns_of(request) == [("user", "silence")] else spell("abc")(request)

    queue: dict[str, Any] = {"max_running_requests": 2, "max_queued_requests": 8}
    silence = {**ASKED, "messages": [{"role": "user", "content": "silence"}]}
    with tenants_front(tmp_path, answer, **queue) as (front, _), ExitStack() as held:
        alice, bob, mona, nobody = (
            held.enter_context(client_of(front, key_of(name))) for name in ("alice", "bob", "mona", "nobody")
        )
        for number in range(8):
            header = f"x-api-key: {key_of('alice')}\r\n"
            held.callback(front.open_raw("/v1/messages", headers=header, **silence).close)
            front.ring.wait_request(number)
        with pytest.raises(anthropic.RateLimitError) as limited:
            alice.messages.create(**ASKED)
        assert int(limited.value.response.headers["retry-after"]) >= 1
        assert content_of(bob.messages.create(**ASKED)) == [{"type": "text", "text": "abc"}]
        assert {request.tenant for request in front.ring.requests} == {"alice", "bob"}
        with pytest.raises(anthropic.AuthenticationError, match="valid API key"):
            nobody.messages.create(**ASKED)
        with pytest.raises(anthropic.PermissionDeniedError, match="role user"):
            mona.messages.count_tokens(model="fake", messages=[USER])


@pytest.mark.parametrize("stream", [False, True])
def test_a_caller_that_leaves_has_its_request_aborted(tmp_path: Path, stream: bool) -> None:
    def answer(request: GenerateRequest) -> list[SequenceOutput]:
        return [output(request, "a")] if request.stream else []

    with http_front(tmp_path, answer) as front:
        connection = front.open_raw("/v1/messages", **ASKED, stream=stream)
        front.ring.wait_request(0)
        connection.close()
        wait_until(lambda: bool(front.ring.aborts), 5.0, "the abort")


# -- count_tokens --------------------------------------------------------------------------------------------


def test_tokens_are_counted_as_they_are_encoded(client: anthropic.Anthropic, front: Front) -> None:
    plain = client.messages.count_tokens(model="fake", messages=[USER]).input_tokens
    assert plain == front.post("/tokenize", messages=[USER], add_generation_prompt=True).json()["count"]
    with_system = client.messages.count_tokens(model="fake", messages=[USER], system="Be brief.").input_tokens
    with_tools = client.messages.count_tokens(model="fake", messages=[USER], tools=TOOLS).input_tokens
    assert plain < with_system < with_tools


def test_a_count_takes_what_messages_take(front: Front) -> None:
    path = "/v1/messages/count_tokens"
    body = {"max_tokens": None, "thinking": {"type": "enabled", "budget_tokens": 9}}
    assert front.post(path, **{**ASKED, **body}).status_code == 200
    assert "messages is empty" in refused(front, path, max_tokens=None, messages=[])
    assert "tools[0].input_schema is missing" in refused(front, path, max_tokens=None, tools=[{"name": "x"}])
    assert "max_tokens" in refused(front, path, max_tokens=3)
    long = "a b " * (5 << 16)
    assert "at most" in refused(front, path, max_tokens=None, messages=[{"role": "user", "content": long}])
